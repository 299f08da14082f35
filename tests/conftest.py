"""What all tests share."""

import uvloop


def pytest_asyncio_loop_factories(config, item):
    """Tests run on the event loop that servers and clients run on."""
    del config, item
    return {"uvloop": uvloop.new_event_loop}
