"""`python -m vllm_overlay.cli`: the command line of an environment whose scripts are not on the PATH."""

import sys

from vllm_overlay.cli import main

if __name__ == "__main__":
    sys.exit(main())
