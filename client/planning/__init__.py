"""From announcements to a route. The planner is a pure function; the router feeds it from the directory."""
