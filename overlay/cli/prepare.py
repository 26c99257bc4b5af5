"""`vllm-overlay prepare`: chat files to a dataset of token ids with a loss mask."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.cli.output import local_folder

if TYPE_CHECKING:
    from vllm_overlay.dataset import DatasetItem
    from vllm_overlay.dataset.conversations import Conversation

HELP = "turn chat files into token ids and a loss mask; with --regenerate the target writes the answers"

DEFAULT_MAX_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "conversations",
        nargs="+",
        type=Path,
        metavar="CONVERSATIONS",
        help='chat files, one JSON object a line: {"messages": [{"role", "content"}, ...]} or '
        'ShareGPT\'s {"conversations": [{"from", "value"}, ...]}',
    )
    parser.add_argument("--model", required=True, help="the target: a folder or a hub name")
    parser.add_argument(
        "-o", "--output", required=True, type=local_folder, metavar="DATASET", help="the folder to write"
    )
    parser.add_argument(
        "--regenerate",
        action="store_true",
        help="let the target write the assistant's turns, in vLLM; options for vLLM go after `--` "
        "(default: keep the given turns)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="with --regenerate: the most tokens of one answer (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="with --regenerate: 0 is greedy (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=_positive,
        metavar="N",
        help="the most tokens of a conversation; longer ones are cut, and dropped when no answer is left "
        "(default: no limit; with --regenerate what the engine takes)",
    )


def run(args: argparse.Namespace) -> int:
    """`args.engine_options` are the words after `--`, which the caller has taken off the command line."""
    from vllm_overlay.dataset.conversations import read_conversations
    from vllm_overlay.dataset.dataset import check_destination, write_dataset
    from vllm_overlay.dataset.mask import load_tokenizer, tokenizer_sha256
    from vllm_overlay.errors import OverlayError

    if args.engine_options and not args.regenerate:
        raise OverlayError("options after `--` are vLLM's, which runs only with --regenerate")
    conversations = read_conversations(args.conversations)
    meta = _meta(args)
    check_destination(args.output, meta)
    tokenizer = load_tokenizer(args.model)
    meta["tokenizer_sha256"] = tokenizer_sha256(tokenizer)
    if args.regenerate:
        items, remarks = _regenerate(args, conversations, tokenizer)
    else:
        items, remarks = _encode(conversations, tokenizer, args.max_length)
    write_dataset(args.output, items, meta)
    print(_summary(args.output, items, remarks))
    return 0


def _meta(args: argparse.Namespace) -> dict[str, Any]:
    """What the dataset is made of: the same for the same command, and nothing that changes from run to run."""
    meta: dict[str, Any] = {
        "model": args.model,
        "conversations": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in args.conversations},
        "regenerated": args.regenerate,
        "max_length": args.max_length,
    }
    if args.regenerate:
        meta |= {
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "engine_options": list(args.engine_options),
        }
    return meta


def _encode(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int | None
) -> tuple[list[DatasetItem], list[str]]:
    from vllm_overlay.dataset import DatasetItem
    from vllm_overlay.dataset.mask import encode_conversation
    from vllm_overlay.errors import OverlayError
    from vllm_overlay.progress import make_bar

    items: list[DatasetItem] = []
    cut = 0
    for conversation in make_bar(conversations, desc="tokenising", unit="chat"):
        encoded = encode_conversation(tokenizer, conversation)
        cut += max_length is not None and len(encoded.token_ids) > max_length
        token_ids, loss_mask = encoded.token_ids[:max_length], encoded.loss_mask[:max_length]
        if loss_mask.any():
            items.append(DatasetItem(conversation.key, token_ids, loss_mask))
    if not items:
        raise OverlayError(f"no conversation has an answer within {max_length} tokens; raise --max-length")
    dropped = len(conversations) - len(items)
    return items, _length_remarks(cut - dropped, dropped)


def _regenerate(
    args: argparse.Namespace, conversations: Sequence[Conversation], tokenizer: Any
) -> tuple[list[DatasetItem], list[str]]:
    from vllm_overlay.offline.engine import build_engine, shut_down
    from vllm_overlay.offline.regenerate import regenerate, vllm_generate

    llm = build_engine(args.model, args.engine_options)
    try:
        # One token less than the engine takes: a capture runs the conversation as a prompt and generates one more.
        engine_length = llm.llm_engine.model_config.max_model_len - 1
        written = regenerate(
            conversations,
            tokenizer,
            vllm_generate(llm, args.temperature),
            max_tokens=args.max_tokens,
            max_length=min(args.max_length or engine_length, engine_length),
        )
    finally:
        shut_down(llm)
    remarks = _length_remarks(written.cut, written.dropped)
    if written.rewritten:
        remarks.append(
            f"The chat template rewrote the history of {written.rewritten}: only the answers after that are masked in."
        )
    return written.items, remarks


def _length_remarks(cut: int, dropped: int) -> list[str]:
    remarks = []
    if cut:
        remarks.append(f"{cut} longer conversation{'s were' if cut > 1 else ' was'} cut.")
    if dropped:
        remarks.append(f"{dropped} {'were' if dropped > 1 else 'was'} dropped: no room for an answer.")
    return remarks


def _summary(output: Path, items: Sequence[DatasetItem], remarks: Sequence[str]) -> str:
    tokens = sum(len(item.token_ids) for item in items)
    answered = sum(int(item.loss_mask.sum()) for item in items)
    counts = (
        f"{output}: {len(items)} conversation{'s' if len(items) > 1 else ''}, {tokens} tokens, of which {answered} "
        f"are the assistant's ({answered / tokens:.1%})."
    )
    return " ".join([counts, *remarks])


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not 1 or more")
    return number
