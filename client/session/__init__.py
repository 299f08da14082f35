"""A session along a route: its steps, its repair. Everything here runs in one asyncio loop."""
