"""What a run shows of itself on a terminal while it trains: `state` collects, `view` draws, `display` keeps it on the screen."""

from burnish.trainer.live_view.display import LiveDisplay, console_mode, loggers_beside, make_display
from burnish.trainer.live_view.state import RunState
from burnish.trainer.live_view.view import body, headline

__all__ = ["LiveDisplay", "RunState", "body", "console_mode", "headline", "loggers_beside", "make_display"]
