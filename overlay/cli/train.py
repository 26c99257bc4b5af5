"""`vllm-overlay train`: an EAGLE-3 draft from captured states."""

from __future__ import annotations

import argparse
import re

from vllm_overlay.cli.output import local_folder
from vllm_overlay.errors import OverlayError

HELP = "train an EAGLE-3 draft from one or more stores"
FIRST_TOKENS = 65536


def layer_ids(text: str) -> tuple[int, ...]:
    """ "2,15,27" -> (2, 15, 27)."""
    return tuple(int(word) for word in text.split(","))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def fraction(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds, 0 or more")
    return number


def number_of_bytes(text: str) -> int:
    """ "64G" -> 64 * 2**30."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes, such as 500000, 800M or 64G")
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def refuse_misfits(args: argparse.Namespace) -> None:
    """Raises OverlayError: options of --follow without it, or several stores with it."""
    for option in ("keep_bytes", "idle_seconds", "first_tokens"):
        if getattr(args, option) is not None and not args.follow:
            raise OverlayError(f"--{option.replace('_', '-')} goes with --follow")
    if args.follow and len(args.stores) > 1:
        raise OverlayError(f"--follow: one store, not {len(args.stores)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stores", nargs="+", metavar="STORE", help="store folders of one model, made by `capture`")
    parser.add_argument("--model", required=True, help="local checkpoint folder of the target")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="RUN",
        type=local_folder,
        help="folder of the run; new or empty unless --resume",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue RUN from its last checkpoint, with the same settings"
    )

    draft = parser.add_argument_group("the draft")
    draft.add_argument(
        "--features", type=layer_ids, metavar="IDS", help="three layer ids (default: 2,N//2,N-3 of N layers)"
    )
    draft.add_argument(
        "--draft-vocab-size",
        type=positive,
        metavar="N",
        help="tokens the draft can propose (default: 32768, or the model's if smaller)",
    )
    draft.add_argument("--hidden-size", type=positive, metavar="N", help="width of the draft (default: the target's)")
    draft.add_argument(
        "--draft-style",
        choices=["llama", "qwen3"],
        default="llama",
        help="whose layer the draft has: Qwen3's norms queries and keys; vLLM 0.24 and later serve it (default: llama)",
    )
    draft.add_argument(
        "--norm-before-residual", action="store_true", help="the residual is the normed feature (default: off)"
    )
    draft.add_argument(
        "--norm-before-fc",
        action="store_true",
        help="one norm over the three features together; vLLM 0.18 and later serve it (default: off)",
    )
    draft.add_argument(
        "--fc-norm",
        action="store_true",
        help="a norm for each of the three features; vLLM 0.22 and later serve it (default: off)",
    )
    draft.add_argument(
        "--norm-output",
        action="store_true",
        help="later draft positions read the normed output; vLLM 0.22 and later serve it, earlier ones ignore it and "
        "accept less (default: off)",
    )
    draft.add_argument(
        "--init",
        choices=["target", "random"],
        default="target",
        help="start from the target's last layer and head (default: target)",
    )

    draft.add_argument(
        "--freeze-head",
        action="store_true",
        help="leave the draft's output head as it starts, with --init target the target's (default: train it)",
    )

    loop = parser.add_argument_group("the training")
    loop.add_argument("--epochs", type=positive, default=3, metavar="N", help="passes over the data (default: 3)")
    loop.add_argument(
        "--steps", type=positive, metavar="N", help="optimiser steps, instead of --epochs (default: by --epochs)"
    )
    loop.add_argument(
        "--lr", type=float, default=1e-3, help="peak learning rate of AdamW; warm-up, then cosine (default: 1e-3)"
    )
    loop.add_argument(
        "--warmup", type=fraction, default=0.05, metavar="X", help="fraction of the steps to warm up (default: 0.05)"
    )
    loop.add_argument("--weight-decay", type=float, default=0.0, metavar="X", help="AdamW's weight decay (default: 0)")
    loop.add_argument(
        "--gradient-clip", type=float, default=1.0, metavar="X", help="largest gradient norm (default: 1.0)"
    )
    loop.add_argument(
        "--batch-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="tokens in a batch, over all ranks (default: 2048)",
    )
    loop.add_argument(
        "--max-length", type=positive, default=4096, metavar="N", help="longer records are cut (default: 4096)"
    )
    loop.add_argument(
        "--ttt-steps", type=positive, default=3, metavar="N", help="steps of test-time training (default: 3)"
    )
    loop.add_argument(
        "--step-weight", type=float, default=0.8, metavar="X", help="weight of step s is X**s (default: 0.8)"
    )
    loop.add_argument(
        "--seed", type=int, default=0, help="of the order of the data and the random weights (default: 0)"
    )
    loop.add_argument(
        "--holdout", type=fraction, default=0.05, metavar="X", help="fraction of records to validate on (default: 0.05)"
    )
    loop.add_argument(
        "--checkpoint-every", type=positive, default=100, metavar="N", help="steps between checkpoints (default: 100)"
    )
    loop.add_argument(
        "--self-test",
        choices=["strict", "warn", "off"],
        default="strict",
        help="if the target's head on the last state does not say the next token in text that the target generated: "
        "refuse, warn, or do not look; other text is warned about (default: strict)",
    )
    loop.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto, a GPU if there is one)"
    )
    loop.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of the matrix products; weights stay float32 (default: auto, bfloat16 on a GPU, float32 on a CPU)",
    )
    loop.add_argument(
        "--attention",
        choices=["auto", "mask", "flex"],
        default="auto",
        help="how packed records are kept apart: plain products and a mask, or PyTorch's flex attention, which needs a "
        "GPU (default: auto, flex on a GPU in bfloat16)",
    )
    loop.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the step with torch.compile, which takes a minute or so at the start (default: with flex "
        "attention on a GPU)",
    )

    loop.add_argument(
        "--tensorboard",
        action="store_true",
        help="curves for TensorBoard in RUN/tensorboard; needs the package tensorboard (default: off)",
    )

    online = parser.add_argument_group("a store that is being written")
    online.add_argument(
        "--follow",
        action="store_true",
        help="learn from each record of the one STORE once, in the order of arrival, and wait for more, until --steps, "
        "Ctrl-C, SIGTERM or --idle-seconds; --epochs and --holdout do not apply (default: off)",
    )
    online.add_argument(
        "--keep-bytes",
        type=number_of_bytes,
        metavar="N",
        help="remove from STORE the rows of records that the last checkpoint has learnt from, the least recently used "
        "first, while all rows take more than N (such as 64G); records that come faster than that are passed over "
        "(default: remove nothing)",
    )
    online.add_argument(
        "--idle-seconds", type=seconds, metavar="S", help="end when no record has come for S seconds (default: wait)"
    )
    online.add_argument(
        "--first-tokens",
        type=positive,
        metavar="N",
        help=f"wait for N tokens, which the draft's vocabulary is chosen from (default: {FIRST_TOKENS})",
    )


def run(args: argparse.Namespace) -> int:
    from vllm_overlay.eagle3.follow import Following
    from vllm_overlay.eagle3.ranks import join_ranks
    from vllm_overlay.eagle3.settings import Settings
    from vllm_overlay.eagle3.training import follow, train

    refuse_misfits(args)
    settings = Settings(
        features=args.features,
        draft_vocab_size=args.draft_vocab_size,
        hidden_size=args.hidden_size,
        norm_before_residual=args.norm_before_residual,
        norm_before_fc=args.norm_before_fc,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
        style=args.draft_style,
        init=args.init,
        train_head=not args.freeze_head,
        ttt_steps=args.ttt_steps,
        step_weight=args.step_weight,
        epochs=args.epochs,
        steps=args.steps,
        learning_rate=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        gradient_clip=args.gradient_clip,
        batch_tokens=args.batch_tokens,
        max_length=args.max_length,
        holdout=args.holdout,
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
        dtype=args.dtype,
        attention=args.attention,
        compile=args.compile,
    )
    with join_ranks(args.device) as ranks:
        shared = {
            "ranks": ranks,
            "self_test": args.self_test,
            "resume": args.resume,
            "tensorboard": args.tensorboard,
        }
        if args.follow:
            following = Following(args.first_tokens or FIRST_TOKENS, args.keep_bytes, args.idle_seconds)
            result = follow(args.stores[0], args.model, args.output, settings, following, **shared)
        else:
            result = train(args.stores, args.model, args.output, settings, **shared)
    if not ranks.is_first:
        return 0
    print(f"{result.run}: {result.steps} steps, loss {result.first_loss:.3f} -> {result.last_loss:.3f}")
    if result.held_out_accuracy is not None:
        print(
            "held out, same first choice as the target: "
            + ", ".join(f"{rate:.1%}" for rate in result.held_out_accuracy)
        )
    return 0
