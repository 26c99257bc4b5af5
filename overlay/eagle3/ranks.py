"""The processes that train one draft together: who they are, what they exchange, how they end.

torchrun starts them and ends the others where one has failed. FSDP2 shards the draft and its optimiser over them. The
target's head and embeddings are on every rank: each step reads the head whole and the embeddings at scattered rows, so
sharded ones would travel in every step, to save what is one or two hundredths of a GPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from vllm_overlay.errors import OverlayError

START_ANEW = "start with torchrun, or unset WORLD_SIZE"


@dataclass(frozen=True)
class Ranks:
    """This process, `number` of `size` that train together, and the device it trains on."""

    number: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The first rank writes, shows the progress and says what is to be said."""
        return self.number == 0

    def shard(self, module: torch.nn.Module) -> None:
        """Spread the parameters, equal on all ranks, over them; a forward gathers them. Alone: nothing.

        Gradients are added up over the ranks, for each rank's loss is its part of a mean over all of them.
        """
        if self.size == 1:
            return
        sharded = fully_shard(module, mesh=init_device_mesh(self.device.type, (self.size,)))
        sharded.set_gradient_divide_factor(1.0)
        # Without this FSDP asks for an average even so, and gloo in torch 2.8 gives a sum when asked for an average.
        sharded.set_force_sum_reduction_for_comms(True)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; the same bits on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()


def alone(device: str = "auto") -> Ranks:
    """One process. Raises OverlayError as `choose_device`."""
    return Ranks(0, 1, choose_device(device))


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """The ranks of a process that torchrun started, or one alone.

    The first rank to fail says why; the others, whose exchange with it breaks, then end with status 1 and say nothing.
    Raises OverlayError: as `choose_device`, fewer GPUs than ranks on this machine, or variables of torchrun that are
    not all there or cannot be.
    """
    if not _has_others(os.environ):
        yield alone(device)
        return
    store, number, size = next(rendezvous("env://"))
    try:
        place = _device_of_rank(device, int(os.environ.get("LOCAL_RANK", number)))
        backend, bound = ("nccl", place) if place.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, device_id=bound)
        yield Ranks(number, size, place)
    except Exception as error:
        mine = str(number)
        if store.compare_set("vllm_overlay/failed_first", "", mine).decode() != mine:
            raise SystemExit(1) from error
        get_error_handler().record_exception(error)  # for the summary that torchrun ends with
        if isinstance(error, OverlayError):
            raise OverlayError(f"rank {number} of {size}: {error}") from error
        raise
    dist.destroy_process_group()


def _has_others(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's variables name other ranks. Raises OverlayError: torch could not find these by them."""
    size = _read_number(environ, "WORLD_SIZE", 1) if "WORLD_SIZE" in environ else 1
    if size == 1:
        return False
    _read_number(environ, "RANK", 0, size - 1)
    _read_number(environ, "MASTER_PORT", 1, 65535)
    if "LOCAL_RANK" in environ:
        _read_number(environ, "LOCAL_RANK", 0)
    if not environ.get("MASTER_ADDR"):
        raise OverlayError(f"WORLD_SIZE={size}, and MASTER_ADDR is not set: {START_ANEW}")
    return True


def _read_number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    if name not in environ:
        raise OverlayError(f"WORLD_SIZE={environ['WORLD_SIZE']}, and {name} is not set: {START_ANEW}")
    text = environ[name]
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise OverlayError(f"{name}={text} in the environment is no number {wanted}: {START_ANEW}")
    return int(text)


def _device_of_rank(name: str, local_rank: int) -> torch.device:
    place = choose_device(name)
    if place.type == "cpu":
        return place
    if ":" in name:
        raise OverlayError(f"--device {name}: under torchrun each rank takes a GPU of its own; use --device cuda")
    if local_rank >= torch.cuda.device_count():
        raise OverlayError(f"rank {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_device(name: str) -> torch.device:
    """ "auto": a GPU where there is one. Raises OverlayError: a name torch does not know, or no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise OverlayError(f"--device {name}: give auto, cpu, cuda or cuda:NUMBER")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OverlayError(f"--device {name}: torch sees no GPU here; use --device cpu")
    return torch.device(name)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together, on every rank (all of them must call); another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `whole`: a whole tensor, equal on all ranks, on the device and in the shards of `like`."""
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
