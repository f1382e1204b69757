"""The server's face: what OpenAI's clients call."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
