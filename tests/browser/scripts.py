"""What the scripted model says to the tests of pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKDOWN = """# A title

Some **bold**, *slanted* and `plain` words, with [a link](https://example.org/page) and ![a picture](https://example.org/x.png).

1. first
2. second
   - inner

| name | value |
|:-----|------:|
| one  | 1     |

```python
print("<b>hello</b>")
```

> quoted

<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"> [bad](javascript:window.pwned=1)
"""

RULES: list[dict[str, Any]] = [
    {"contains": "markdown", "say": MARKDOWN},
    {"contains": "endless", "say": "on and on ", "finish": "length", "delay_ms": 5},
    {"contains": "later", "say": "Here I am.", "first_delay_ms": 1500},
    {"contains": "several", "say": ["The first answer.", "The second answer.", "The third answer."]},
    {"contains": "ponder", "think": "Hmm, **let me** see.", "say": "So it is."},
    {"contains": "weather", "role": "user", "call": {"name": "get_weather", "arguments": {"city": "Paris"}}},
    {"role": "tool", "say": "It is sunny in Paris."},
    {"contains": "person", "say": '{"name": "Ann"}'},
    {"contains": "break down", "say": "half an answer and more", "fail_after": 6},
    {"contains": "crash", "say": "on and on it goes", "crash_after": 5, "delay_ms": 5},
    {"contains": "unsure", "say": "maybe", "logprob": -2.5},
    {"contains": "You are a pirate", "where": "prompt", "say": "Arr."},
    {"contains": "letters", "say": "ä€𝄞 end"},
    {"echo": True},
]


def script(folder: Path) -> str:
    """Write it; the model's name for `octavo serve`."""
    path = folder / "script.json"
    path.write_text(json.dumps(RULES))
    return f"scripted:{path}"
