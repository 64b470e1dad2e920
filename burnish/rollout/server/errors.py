"""What goes wrong in a request, in the shape in which OpenAI's clients read it."""

from typing import Any

from burnish.utils.errors import RolloutError


class ApiError(RolloutError):
    """A request that is answered by an error.

    Args:
        message: a sentence for the client.
        status: of HTTP.
        param: the field that is wrong.
        code: OpenAI's name of the case, where there is one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class EngineStopped(RolloutError):
    """The engine answers nothing any more: it failed, or the server is being shut down."""
