"""What the documentation site needs beyond MkDocs: the README as its first page, and links that leave `docs/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills the first page, and sends links to files outside `docs/` to the repository."""
    base = ROOT / "docs" / page.file.src_uri
    if page.file.src_uri == "index.md":
        markdown, base = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "README.md"

    def target(match: re.Match[str]) -> str:
        path = (base.parent / match[1]).resolve()
        if not path.exists():
            raise ValueError(f"{base.name} links to {match[1]}, which does not exist")
        inside = path.relative_to(ROOT)
        if inside.parts[0] != "docs" or path.is_dir():
            return f"]({config['repo_url']}/blob/main/{inside.as_posix()}{match[2] or ''})"
        depth = "../" * (len(Path(page.file.src_uri).parts) - 1)
        return f"]({depth}{Path(*inside.parts[1:]).as_posix()}{match[2] or ''})"

    return LINK.sub(target, markdown)
