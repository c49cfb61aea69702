"""Moved to `strobe.transfer`; this goes with the old sampling."""

from strobe.transfer import download as download
from strobe.transfer import upload as upload
