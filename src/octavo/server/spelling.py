"""The client's names of fields, for bodies that were translated to another API's.

Owns: renaming a refusal's field, also in its message. Does not: know any API's names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.faults import ApiError

Spelling = Sequence[tuple[str, str]]  # (pattern of a part of a field's path, the client's name)


def rename_field(error: ApiError, spelling: Spelling) -> ApiError:
    """Replace the field's name in a refusal by the client's; return the refusal."""
    if error.param is None:
        return error
    param = error.param
    for ours, theirs in spelling:
        param = re.sub(ours, theirs, param)
    is_word = error.param.isidentifier()  # a word may be part of other words: replace it once
    error.message = error.message.replace(error.param, param, 1 if is_word else -1)
    error.param = param
    return error
