"""Writes docs/reference from the schemas: ``python docs/generate``."""

from pathlib import Path

from reference_pages import PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        path = Path(__file__).parent.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(), encoding="utf-8")
