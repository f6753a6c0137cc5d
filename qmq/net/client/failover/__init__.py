"""What has failed while its broker is away: another broker takes it, or a local file."""
