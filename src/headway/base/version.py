"""The version of Headway, as in the package's metadata; it is known where Headway is not installed too."""

VERSION = "0.1.0"
