"""One leaf per library, imported by whoever uses that library. Must never be imported by the rest of regrow."""
