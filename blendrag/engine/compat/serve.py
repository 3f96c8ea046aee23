"""``vllm serve`` where the command ``vllm`` does not start. The command asks for the version of a package of
that name, and builds for CPUs have another name."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:  # from 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup


__all__ = ["main", "make_arg_parser"]


def main() -> None:
    """Run the command line as vLLM's own ``main`` does."""
    cli_env_setup()
    command = ServeSubcommand()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
