"""The parsers, each with the errors that it may raise and with real inputs to begin from, for Hypothesis and atheris.

Nothing here touches the network: addresses are resolved only where they are numbers. Signatures cannot be guessed, so
inputs enter behind them: `open_announcement(verified=True)`, records signed anew, frames sealed by the test.
"""

from tests.fuzz.parsers import calls, channels, files, messages, neighbours, records

PARSERS = {
    parser.name: parser for part in (messages, channels, records, calls, neighbours, files) for parser in part.PARSERS
}
