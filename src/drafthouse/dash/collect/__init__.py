"""The sources of the page: each asks one thing (a run, a training, a server, the fleet) and keeps what it last said."""
