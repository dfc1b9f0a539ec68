"""The site of `make docs`: everything public has its entry and an example, no page is lost, nothing comes from elsewhere."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from codespell_lib import main as codespell
from test_import_names import PUBLIC

import exogym
from exogym import LocalTrainer

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "site"))

import build
import reference
