"""`python -m llamactl_builder`: the patch-set tool, and the paths that make targets print."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamactl_builder import build, models, patchset, paths, pin, source
from llamactl_builder.apply import apply
from llamactl_builder.errors import BuilderError, os_errors
from llamactl_builder.export import export
from llamactl_builder.progress import TerminalProgress
from llamactl_builder.verify import verify

LOOP = """the developer's loop:
  apply DIR                    a git repository: pristine, one commit for each hook, the overlay
  edit, compile and test there; a new hook is a commit `name: what it does` + why and where called
  export DIR [--hook NAME]     hooks, overlay and tree hash are written back to patches/
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(
        prog="python -m llamactl_builder",
        epilog=LOOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = main.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("fetch", help="get the pinned source and print where it is")
    verb.add_argument("--record", action="store_true", help="record its hash, after a new pin")
    verb = verbs.add_parser("apply", help="make a patched tree to work in")
    verb.add_argument("directory", type=Path)
    verb = verbs.add_parser("export", help="write the patch set back from such a tree")
    verb.add_argument("directory", type=Path)
    verb.add_argument("--hook", help="the hook that uncommitted edits of upstream files belong to")
    verbs.add_parser("verify", help="prove that source and patch set give the recorded tree")
    verb = verbs.add_parser(
        "engine-path", help="print the patched llama-server, building it if needed"
    )
    verb.add_argument("--cached", action="store_true", help="build nothing: print one, or nothing")
    verbs.add_parser("model-path", help="print the default model, fetching it if needed")
    return main


@os_errors("The patch-set tool")
def run(args: argparse.Namespace, progress: TerminalProgress) -> list[str]:
    """Do one verb; answers the lines to print."""
    patches = paths.patches_dir()
    the_pin = pin.load(patches)
    match args.verb:
        case "fetch":
            if args.record:
                source.record(the_pin, patches)
                the_pin = pin.load(patches)
            return [str(source.fetch(the_pin, patches, progress))]
        case "apply":
            clean = source.fetch(the_pin, patches, progress)
            apply(clean, the_pin, patchset.load(patches), args.directory)
            return [str(args.directory)]
        case "export":
            return export(args.directory, the_pin, patches, args.hook) or ["nothing changed"]
        case "engine-path" if args.cached:
            found = build.cached_engine()
            return [] if found is None else [str(found)]
        case "engine-path":
            return [str(build.ensure_engine(progress=progress).path)]
        case "model-path":
            return [str(models.ensure_default_model(progress))]
        case _:
            verify(source.fetch(the_pin, patches, progress), the_pin, patches)
            return [f"verified: {the_pin.tag} + {patches} = {the_pin.patched_sha256}"]


def main() -> int:
    """Entry point; results on stdout, everything else on stderr."""
    args = parser().parse_args()
    try:
        with TerminalProgress() as progress:
            lines = run(args, progress)
    except BuilderError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if lines:
        print("\n".join(lines))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
