"""The version of Headway, as in the package metadata, also available when it is not installed."""

VERSION = "0.1.0"
