"""What may be asked for: an engine, a geometry, and what becomes of a page."""

from __future__ import annotations

from typing import Self

from pydantic import StrictBool  # noqa: TC002 - pydantic reads the annotations at run time

from llamactl_supervisor.fields import (
    DEFAULT_HOST,
    DEFAULT_N_CTX,
    DEFAULT_N_SEQ,
    DEFAULT_PORT,
    AbsolutePath,
    ExtraArgs,
    FileName,
    Host,
    NCtx,
    NSeq,
    PageName,
    Port,
    RequestedCtx,
    Slot,
)
from llamactl_supervisor.models.base import Wire
from llamactl_supervisor.models.run import ProcessContext


class EngineOptions(Wire):
    """What may be asked of an engine whatever its model."""

    n_ctx: RequestedCtx = DEFAULT_N_CTX
    """Context in tokens, in total over all slots; `auto`: as the engine does. Changes live."""
    n_seq: NSeq = DEFAULT_N_SEQ
    """Slots: conversations at once. Changes live."""
    kv_unified: StrictBool | None = None
    """One pool for all slots, or a part of it for each; else as the engine does. Changes live."""
    host: Host = DEFAULT_HOST
    """Where clients may come from: an IPv4 address of this machine."""
    port: Port = DEFAULT_PORT
    """TCP port for the clients."""
    extra_args: ExtraArgs = ()
    """Further options of llama-server."""
    api_key_file: AbsolutePath | None = None
    """File with the keys that clients must present."""


class EngineRequest(EngineOptions):
    """The engine that is wanted. n_ctx is the total over all slots."""

    model: AbsolutePath


class UpRequest(Wire):
    """Run this engine with this llama-server binary.

    With a `context` it is an engine of `llamactl run`: it listens on its private socket alone, and
    its owner has the port. Host and port of the spec then mean nothing.
    """

    spec: EngineRequest
    engine_path: AbsolutePath
    context: ProcessContext | None = None


class EngineConfig(EngineOptions):
    """The engine as it is configured; without a model it is a part of what `up` asks for."""

    model: AbsolutePath | None = None
    """GGUF file. With it the daemon brings the engine up when it starts."""
    engine_path: AbsolutePath | None = None
    """The llama-server that is run; default: `up` builds one, the daemon takes the last one."""

    @classmethod
    def of(cls, request: UpRequest) -> Self:
        """Return the configuration that asks for this very engine."""
        return cls(**request.spec.model_dump(), engine_path=request.engine_path)

    def request(self, engine_path: str | None = None) -> UpRequest | None:
        """Return the whole request, None where it is not whole."""
        path = self.engine_path or engine_path
        if self.model is None or path is None:
            return None
        spec = EngineRequest.model_validate(self.model_dump(exclude={"engine_path"}))
        return UpRequest(spec=spec, engine_path=path)


class RestartRequest(Wire):
    """Load the engine again; `accept_loss`: even if a conversation cannot be kept."""

    accept_loss: StrictBool = False


class ReconfigureRequest(Wire):
    """Change the live geometry; a field left out keeps its effective value."""

    n_ctx: NCtx | None = None
    n_seq: NSeq | None = None
    kv_unified: StrictBool | None = None
    dry_run: StrictBool = False


class ApplyRequest(Wire):
    """Bring the engine to this, live where that is possible.

    What `engine` leaves out stays as it is, or with `replace` has its default; model and
    engine_path stay in any case. `live_only`: rather nothing than a relaunch. `overcommit`: a
    relaunch that memory is not known to suffice for is no matter. `accept_loss`: neither is one
    that cannot keep every conversation.
    """

    engine: EngineConfig = EngineConfig()
    replace: StrictBool = False
    live_only: StrictBool = False
    dry_run: StrictBool = False
    overcommit: StrictBool = False
    accept_loss: StrictBool = False


class PageDropRequest(Wire):
    """The page that is freed. What a name is, the engine says."""

    name: PageName


class PageRequest(PageDropRequest):
    """The page, and the slot that it comes out of or goes into."""

    slot: Slot


class PageSpillRequest(PageDropRequest):
    """The page that is written to files; `filename` None: they have its name."""

    filename: FileName | None = None
    drop: StrictBool = False


class PageFileRequest(Wire):
    """The files, and the slot that they are written from or go into."""

    filename: FileName
    slot: Slot
