"""HMAC-SHA256 signatures made with the secret of a job.

A signature hides nothing. It proves that a holder of the secret wrote the bytes. A context, which both sides name,
prevents replay elsewhere.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from polyaccel.errors import CommError

SECRET_VARIABLE = "POLYACCEL_JOB_SECRET"
LEAST_SECRET_LENGTH = 16
_DIGEST = "sha256"
MAC_NBYTES = 32


def job_secret_from_env(environ: Mapping[str, str]) -> bytes | None:
    """The secret in POLYACCEL_JOB_SECRET; None where it is not set. Raises CommError for one that can be guessed."""
    text = environ.get(SECRET_VARIABLE, "")
    if not text:
        return None
    if len(text) < LEAST_SECRET_LENGTH:
        raise CommError(
            f"{SECRET_VARIABLE} has {len(text)} characters, and {LEAST_SECRET_LENGTH} are the fewest",
            hint=f"export {SECRET_VARIABLE}=$(openssl rand -hex 32) before the launcher, the same on every host",
            value=len(text),
        )
    return text.encode()


def sign(secret: bytes, context: str, data: bytes) -> bytes:
    """`data` behind its seal."""
    return _seal(secret, context, data) + data


def verify(secret: bytes, context: str, message: bytes) -> bytes | None:
    """The data of a message that `sign` made with this secret for this context; None for any other message."""
    seal, data = message[:MAC_NBYTES], message[MAC_NBYTES:]
    return data if hmac.compare_digest(seal, _seal(secret, context, data)) else None


def _seal(secret: bytes, context: str, data: bytes) -> bytes:
    # The length keeps a context apart from data that begins like it.
    place = context.encode()
    return hmac.digest(secret, len(place).to_bytes(8, "little") + place + data, _DIGEST)
