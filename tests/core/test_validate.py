"""Checks of arguments, where their messages alone are tested elsewhere."""

from __future__ import annotations

import pytest

from aiohooks._core.validate import check_directory
from aiohooks.errors import InvalidArgumentError

pytestmark = pytest.mark.every_python


def test_a_url_is_not_a_directory_and_a_drive_is_none() -> None:
    """One letter before the slashes is that of a drive."""
    check_directory("c://runs", "path", url="no URL")
    with pytest.raises(InvalidArgumentError, match="give the path of a directory; no URL"):
        check_directory("s3://runs", "path", url="no URL")
