"""``tierckpt agent``: an agent run by hand, as a service or beside the job's containers."""

from __future__ import annotations

import os
import signal

import click

from tierckpt import config
from tierckpt.agent.runtime import Home
from tierckpt.agent.server import ENDS, Server
from tierckpt.cli.output import clean
from tierckpt.cli.target import open_store
from tierckpt.errors import StoreError


@click.command(short_help="Run a node's agent in the foreground.")
@click.argument("root", required=False)
@click.option("--run", help="The run's name; by default that of the store at ROOT.")
@click.option("--node", help="The node's name (default: TIERCKPT_NODE, else this machine).")
@click.option(
    "--metrics",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    envvar="TIERCKPT_METRICS",
    help="Serve figures for Prometheus at http://127.0.0.1:PORT/metrics; 0: any free port.",
)
def command(root: str | None, run: str | None, node: str | None, metrics: int | None) -> int:
    """Run the agent of one run on this node in the foreground, until SIGTERM or SIGINT.

    Trainers of the same user and node find it in the runtime folder ($XDG_RUNTIME_DIR/tierckpt) and use it instead of
    starting one of their own, which would die with their container, Slurm step or login session. At the end it drains
    the newest complete snapshot. Name the run with --run (the trainers' run=), or give the ROOT of its store.
    """
    if (root is None) == (run is None):
        raise click.UsageError("give ROOT or --run" + ("" if run is None else ", not both"))
    if run is None:
        assert root is not None
        run = open_store(root).run
    node = node or config.node()
    home = Home.of(node, run, make=True)
    assert home is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    with home.locked(config.AGENT_START):
        other = home.connect(config.AGENT_START)
        if other is not None:
            other.close()
            raise StoreError(f"an agent of run {run} already runs on node {node} ({home.socket})")
        listener = home.listen()
        server = Server(home, listener, node=node, run=run, stays=True)
        if metrics is not None:
            try:
                server.serve_metrics(metrics)
            except BaseException:
                listener.close()
                home.clear()
                raise
    click.echo(clean(f"agent of run {run} on node {node}, process {os.getpid()}, listens on {home.socket}"), err=True)
    if server.metrics:
        click.echo(f"metrics at http://127.0.0.1:{server.metrics}/metrics", err=True)
    server.serve()
    return 0
