"""Speech over HTTP, from a model served along with the engine's: `headway serve --audio MODEL`.

decoder      a client's file as samples, decoded in a process with limits
transcriber  samples as text: window by window, so that a long recording holds up nobody and streams
output       the transcript in each format: json, text, srt, vtt, verbose_json, events
form_fields  the fields of a request, checked
routes       /v1/audio/transcriptions, /v1/audio/translations
"""

from __future__ import annotations

from headway.server.audio.routes import router

__all__ = ["router"]
