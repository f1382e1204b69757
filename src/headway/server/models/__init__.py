"""The models of a server: where they come from, which of them are loaded, and who holds them.

sources.py        ModelSource, ModelFolder: what may be loaded, under which names; nothing is opened here
memory.py         allowance, room_for: what each model takes, and which give way to another: pure functions
served_model.py   ServedModel, LoadedEngine: one model, its state, its adapters and who uses it
engines.py        what opens and closes an engine, in a thread
served_models.py  ServedModels: all of them; it alone opens and closes engines
lease.py          ModelLease: one request's or session's hold on an engine
"""

from headway.server.models.lease import ModelLease, requested_model
from headway.server.models.served_model import ServedModel
from headway.server.models.served_models import ServedModels
from headway.server.models.sources import ModelFolder, ModelSource, ModelSources

__all__ = ["ModelFolder", "ModelLease", "ModelSource", "ModelSources", "ServedModel", "ServedModels", "requested_model"]
