"""RootPath: the server behind a proxy that passes it on under a path, such as /llm."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Takes the root path off a request's path, so that all that follows sees the routes as they are. A proxy that has
    taken it off already may leave it out."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app = app
        self.root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self.root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.root) or "/"}
        await self.app(scope, receive, send)
