"""`octavo trace DIR --perfetto FILE`: a recording as a trace for ui.perfetto.dev, or as a page."""

from __future__ import annotations

import argparse

from octavo.cli.flags import UsageError, check_output
from octavo.cli.recorded_views import Views, Wanted, write_views
from octavo.cli.terminal import say
from octavo.observe.frames.streams import MAX_WRITTEN
from octavo.observe.perfetto import MAX_TRACKS
from octavo.observe.recording import open_recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("recording", metavar="DIR", help="what octavo serve --record wrote")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write Chrome's trace format; compressed if FILE ends in .gz"
    )
    parser.add_argument("--page", metavar="FILE", help="write the dashboard as one HTML file that plays the recording")
    parser.add_argument(
        "--begin", type=float, default=0.0, metavar="S", help="leave out what was before this second [0]"
    )
    parser.add_argument(
        "--end", type=float, default=float("inf"), metavar="S", help="and what was behind this one [all]"
    )
    parser.add_argument(
        "--max-requests", type=int, default=MAX_TRACKS, metavar="N", help=f"requests with a track [{MAX_TRACKS:,}]"
    )
    parser.add_argument(
        "--max-steps", type=int, default=MAX_WRITTEN, metavar="N", help=f"steps in a page [{MAX_WRITTEN:,}]"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files; return 1 if the recording does not replay to the same decisions."""
    if args.perfetto is None and args.page is None:
        raise UsageError("nothing is to be written; give --perfetto FILE, --page FILE or both")
    if not 0 <= args.begin < args.end:
        raise UsageError(
            f"--begin is {args.begin:g} and --end {args.end:g}; give seconds from 0, the end behind the begin"
        )
    check_output("--perfetto", args.perfetto)
    check_output("--page", args.page)
    for name in ("max_requests", "max_steps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give 1 or more")
    wanted = Wanted(args.page, args.perfetto, args.begin, args.end, args.max_steps, args.max_requests)
    views = write_views(open_recording(args.recording), wanted)
    tell(views, wanted)
    return 0 if views.report.is_equal else 1


def tell(views: Views, wanted: Wanted) -> None:
    """Print what was written and what was left out."""
    report = views.report
    if report.difference is not None:
        say(
            f"step {report.difference.step} differs from the recorded one; nothing behind it is shown",
            *report.difference.lines,
        )
    if wanted.perfetto is not None:
        told = f"{wanted.perfetto}: {views.num_trace_events:,} events; open it at https://ui.perfetto.dev"
        if views.num_undrawn_requests:
            told += (
                f". {views.num_undrawn_requests:,} requests have no track: raise --max-requests, or give --begin, --end"
            )
        print(told)
    if wanted.page is not None:
        told = f"{wanted.page}: {views.num_frames:,} frames"
        if views.num_cut_steps:
            told += f". {views.num_cut_steps:,} steps are left out: raise --max-steps, or give --begin, --end"
        print(told)
