"""The pages of the console: HTML made of templates, with styles, scripts and plots of the project's own."""

from __future__ import annotations

from qmq.console.pages.render import error_page
from qmq.console.pages.views import routes

__all__ = ["error_page", "routes"]
