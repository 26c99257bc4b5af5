"""The check before the first step names what is wrong with a store: each mistake made on purpose, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.eagle3.conftest import HIDDEN, LAYERS, VOCABULARY
from vllm_overlay.eagle3.data import Corpus, open_corpus
from vllm_overlay.eagle3.selftest import find_cause, measure_agreement
from vllm_overlay.eagle3.target import Target, load_target, rms_norm
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter, pack_rows

CPU = torch.device("cpu")
LAYER_IDS = (2, 3, 5, 6)
PROMPT = 8


@pytest.fixture(scope="module")
def target(model_folder: Path) -> Target:
    return load_target(model_folder)


@pytest.fixture
def corpus_of(tmp_path: Path, states_of: Callable[..., torch.Tensor]) -> Callable[..., Corpus]:
    """A corpus of given texts, with the states of the reference, changed or not, in a dtype."""

    def make(
        texts: Sequence[torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
        dtype: str = "float32",
        num_prompt_tokens: int = PROMPT,
    ) -> Corpus:
        meta = StoreMeta(LAYER_IDS, HIDDEN, dtype, LAYERS, "tiny", "tiny", "0.0.0", "V1")
        writer = StoreWriter.open(tmp_path / "store", meta)
        for number, text in enumerate(texts):
            states = change(states_of(text, LAYER_IDS))
            first = writer.append(pack_rows(states) if meta.is_packed else states.to(meta.torch_dtype).contiguous())
            rows = np.arange(first, first + len(text), dtype=np.int64)
            mask = np.arange(len(text)) >= PROMPT
            writer.commit(
                [PendingRecord(f"r{number}", text.numpy(), rows, num_prompt_tokens, True, "length", None, mask)]
            )
        writer.close()
        return open_corpus([tmp_path / "store"], (2, 3, 5))

    return make


@pytest.fixture(scope="module")
def greedy_texts(write_on: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
    return [write_on(prompt, 40) for prompt in make_prompts(6)]


def make_prompts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (PROMPT,), generator=generator) for _ in range(count)]


def write_with(
    target: Target, states_of: Callable[..., torch.Tensor], choose: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Texts of 40 tokens, each token chosen from the target's logits."""
    texts = []
    for text in make_prompts(6):
        while len(text) < 40:
            logits = target.logits(states_of(text, (LAYERS,))[-1])  # [1, vocab]
            text = torch.cat([text, choose(logits[0])[None]])
        texts.append(text)
    return texts


def verdict(corpus: Corpus, target: Target) -> str:
    agreement = measure_agreement(corpus, target, CPU)
    assert agreement.is_suspicious
    return str(find_cause(corpus, target, agreement, CPU))


def test_good_states_are_not_suspected(
    corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target
) -> None:
    corpus = corpus_of(greedy_texts)
    agreement = measure_agreement(corpus, target, CPU)
    assert (agreement.agreed, agreement.positions) == (6 * 32, 6 * 32)
    assert find_cause(corpus, target, agreement, CPU) is None


def test_states_in_8_bits_are_not_suspected_and_wrong_ones_are(
    corpus_of: Callable[..., Corpus],
    greedy_texts: list[torch.Tensor],
    target: Target,
    states_of: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    """Text that takes the second choice where it is 2% below the first: tied in float8, and not in bfloat16."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        (best, second), tokens = logits.topk(2)
        return tokens[int(second >= 0.98 * best)]

    texts = write_with(target, states_of, choose)
    agreements = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        agreements[dtype] = measure_agreement(corpus_of(texts, dtype=dtype), target, CPU)
        (tmp_path / "store").rename(tmp_path / dtype)
    assert agreements["bfloat16"].is_suspicious and not agreements["float8_e4m3fn"].is_suspicious
    shifted = corpus_of(greedy_texts, lambda states: states.roll(1, dims=0), dtype="float8_e4m3fn")
    assert verdict(shifted, target).startswith("the rows are shifted: each holds the state of the token before it")


def test_normed_states(corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target) -> None:
    def norm(states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states[:, 3], target.final_norm, target.config.rms_norm_eps)
        return torch.stack([states[:, 0], states[:, 1], states[:, 2], normed], dim=1)

    assert verdict(corpus_of(greedy_texts, norm), target).startswith("the norm is wrong")


@pytest.mark.parametrize(("shift", "whose"), [(1, "before"), (-1, "after")])
def test_shifted_rows(
    corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target, shift: int, whose: str
) -> None:
    corpus = corpus_of(greedy_texts, lambda states: states.roll(shift, dims=0))
    assert verdict(corpus, target).startswith(f"the rows are shifted: each holds the state of the token {whose} it")


def test_swapped_layers(corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target) -> None:
    corpus = corpus_of(greedy_texts, lambda states: states[:, [0, 3, 2, 1]])
    assert verdict(corpus, target) == (
        "the layer ids are wrong: what is called 3 is the last state (read so, 100.0% agree)"
    )


def test_sampled_text(corpus_of: Callable[..., Corpus], target: Target, states_of: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = write_with(target, states_of, lambda logits: logits.softmax(0).multinomial(1, generator=generator)[0])
    assert verdict(corpus_of(texts), target).startswith("the text is sampled and not greedy")


def test_another_quantisation(
    corpus_of: Callable[..., Corpus], target: Target, states_of: Callable[..., torch.Tensor]
) -> None:
    """Text by logits with an error of a tenth of their spread, as where weights are rounded to a few bits."""
    generator = torch.Generator().manual_seed(5)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        return (logits + 0.1 * logits.std() * torch.randn(VOCABULARY, generator=generator)).argmax()

    assert verdict(corpus_of(write_with(target, states_of, choose)), target).startswith("the precision is another")


def test_text_of_somebody_else(corpus_of: Callable[..., Corpus], target: Target) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, VOCABULARY, (40,), generator=generator) for _ in range(6)]
    assert verdict(corpus_of(texts), target).startswith("the text or the checkpoint is another")


def test_ties_in_16_bits_are_no_disagreement(
    corpus_of: Callable[..., Corpus], target: Target, states_of: Callable[..., torch.Tensor]
) -> None:
    """An engine in bfloat16 rounds its logits: any that is within half a rounding of the best may win there."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        best = logits.max()
        possible = logits >= best - torch.finfo(torch.bfloat16).eps / 2 * best.abs()
        return logits.masked_fill(~possible, torch.inf).argmin()

    texts = write_with(target, states_of, choose)
    tied = measure_agreement(corpus_of(texts, dtype="bfloat16"), target, CPU)
    missed = sum(
        int(choose(row) != row.argmax())
        for text in texts
        for row in target.logits(states_of(text, (LAYERS,))[:, 0])[PROMPT - 1 : -1]
    )
    assert missed >= 3 and tied.agreed > 6 * 32 - missed


def test_text_of_unknown_authors_is_not_suspected(
    corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target
) -> None:
    """`capture` sends whole conversations as prompts, so that no rate is expected."""
    generator = torch.Generator().manual_seed(5)
    texts = [text.clone() for text in greedy_texts]
    for text in texts:  # a third of the answer is somebody else's
        text[PROMPT::3] = torch.randint(3, VOCABULARY, text[PROMPT::3].shape, generator=generator)
    good = corpus_of(texts, num_prompt_tokens=40)
    agreement = measure_agreement(good, target, CPU)
    assert not agreement.generated and not agreement.is_suspicious and agreement.rate < 0.9
    assert find_cause(good, target, agreement, CPU) is None


def test_shifted_rows_show_in_prompts(
    corpus_of: Callable[..., Corpus], greedy_texts: list[torch.Tensor], target: Target
) -> None:
    """A reading that fits better shows a mistake whoever wrote the text."""
    corpus = corpus_of(greedy_texts, lambda states: states.roll(1, dims=0), num_prompt_tokens=40)
    agreement = measure_agreement(corpus, target, CPU)
    assert not agreement.is_suspicious
    assert str(find_cause(corpus, target, agreement, CPU)).startswith("the rows are shifted")
