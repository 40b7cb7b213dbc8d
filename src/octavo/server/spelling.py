"""Names of fields as the client spelled them, where a body was translated to another interface's.

Owns: renaming a refusal's field, in its message too. Does not: know any interface's names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.faults import ApiError

Spelling = Sequence[tuple[str, str]]  # (pattern of a part of a field's path, what the client calls it)


def rename_field(error: ApiError, spelling: Spelling) -> ApiError:
    """Put the client's name of the field into a refusal; return it."""
    if error.param is None:
        return error
    param = error.param
    for ours, theirs in spelling:
        param = re.sub(ours, theirs, param)
    is_word = error.param.isidentifier()  # which may be part of other words
    error.message = error.message.replace(error.param, param, 1 if is_word else -1)
    error.param = param
    return error
