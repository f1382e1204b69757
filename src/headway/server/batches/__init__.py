"""OpenAI's Files and Batches: a file of requests is uploaded, computed in the background, and its results downloaded.

form             the upload's multipart body
files            the files of each key
jobs             the batches of each key, each a job over its file in a thread (`headway.jobs`)
response_schema  the fields of responses, for the OpenAPI document
routes           /v1/files and /v1/batches

Files and batches end with the server. A file's name is only ever sent back, never used as a path.
"""

from __future__ import annotations

from headway.server.batches.routes import router

__all__ = ["router"]
