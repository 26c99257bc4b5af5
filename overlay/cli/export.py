"""`vllm-overlay export`: a trained draft as a checkpoint that vLLM serves."""

from __future__ import annotations

import argparse

from vllm_overlay.cli.output import local_folder

HELP = "write a trained draft as a checkpoint that vLLM serves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="folder made by `train`")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR",
        type=local_folder,
        help="folder of the checkpoint; must not exist or be empty",
    )
    parser.add_argument(
        "--format",
        choices=["vllm", "speculators"],
        default="vllm",
        help="vllm: a plain config.json; speculators: that of speculators 0.9 (default: vllm)",
    )
    parser.add_argument(
        "--checkpoint", default="best", help="best (on held-out records), last, untrained, or a step (default: best)"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights (default: auto, the target's)",
    )


def run(args: argparse.Namespace) -> int:
    from vllm_overlay.eagle3.export import export_run

    output = export_run(args.run_folder, args.output, format=args.format, checkpoint=args.checkpoint, dtype=args.dtype)
    print(output)
    return 0
