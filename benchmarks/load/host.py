"""The server under test in a process of its own: ``outrider serve``'s application, and a switch for fixed drafting.

What a request can say for itself it says (``speculation``: off, idle); whether the planner or a fixed number decides is a
setting of the engine, so it is switched between slices, while nothing runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from outrider.cli.options import resolve_settings
from outrider.cli.session import open_session
from outrider.drafters.portfolio import members_of
from outrider.engine.costs import CostTable
from outrider.engine.engine import Engine
from outrider.engine.planner import Planner
from outrider.serve.app import create_app
from outrider.serve.auth import KeyRing
from outrider.serve.bridge import Bridge
from outrider.serve.config import ServeConfig
from outrider.serve.run import Listener, bind

__all__ = ["PlannerSwitch", "main"]


class PlannerSwitch:
    """Two planners of one engine: the one that it came with, and one that always drafts.

    Args:
        engine: with a drafter; its schedule is adaptive.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        fixed = Planner(replace(engine.config, schedule="fixed"), CostTable(), members_of(engine.drafter))
        self._planners = {"adaptive": engine.planner, "fixed": fixed}

    def choose(self, schedule: str) -> None:
        """Decide by this planner from now on. Only while nothing runs.

        Raises:
            ValueError: an unknown schedule, or requests are running.
        """
        if schedule not in self._planners:
            raise ValueError(f"schedule {schedule!r} is unknown; allowed: {', '.join(self._planners)}")
        if self._engine.has_work:
            raise ValueError("requests are running; switch between slices")
        self._engine.planner = self._planners[schedule]


def main(arguments: list[str] | None = None) -> None:
    """Serve on a free port; the first line of output is JSON with the address."""
    import uvicorn
    from fastapi import Request
    from starlette.responses import JSONResponse, Response

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON object of outrider serve's settings")
    values = json.loads(parser.parse_args(arguments).settings)
    session = open_session(resolve_settings(values, None))
    config = ServeConfig(port=0, max_waiting=4096)
    app = create_app(session.engine, config=config, keys=KeyRing(()))
    has_choice = session.engine.drafter is not None and session.settings.engine.schedule == "adaptive"
    switch = PlannerSwitch(session.engine) if has_choice else None

    async def choose(request: Request) -> Response:
        schedule = str((await request.json())["schedule"])

        def work(bridge: Bridge) -> str:
            if switch is None:
                return "no drafter, or a fixed schedule from the start"
            try:
                switch.choose(schedule)
            except ValueError as error:
                return str(error)
            return ""

        error = await app.state.service.worker.call(work)
        return JSONResponse({"error": error}, status_code=409 if error else 200)

    app.add_api_route("/bench/schedule", choose, methods=["POST"])
    bound = bind(config)
    place = {"host": "127.0.0.1", "port": bound.getsockname()[1], "settings": session.describe()}
    settings = uvicorn.Config(app, loop="asyncio", http="h11", ws="none", log_config=None, access_log=False)

    def say() -> None:
        print(json.dumps(place), flush=True)

    worker = app.state.service.worker
    Listener(settings, say, worker=worker, drain_timeout_s=config.drain_timeout_s).run(sockets=[bound])


if __name__ == "__main__":
    main(sys.argv[1:])
