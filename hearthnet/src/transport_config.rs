//! The configuration's transport section in the transport's own terms.

use std::time::Duration;

use crate::config::Transport;
use crate::failure::{Failure, Kind};

/// Applies the settings to the transport's defaults and checks their ranges.
pub(crate) fn transport_config(t: &Transport) -> Result<hearthnet_transport::Config, Failure> {
    let config = hearthnet_transport::Config {
        chunk_bytes: t.chunk_bytes,
        window_chunks: t.window_chunks,
        compress_above: Some(t.compress_above_bytes).filter(|&n| n > 0),
        keep_alive: Duration::from_secs(t.keep_alive_seconds),
        session_lifetime: Duration::from_secs(t.session_lifetime_seconds),
        max_sessions: t.max_sessions,
        recv_buffer_bytes: t.receive_buffer_bytes,
        ..Default::default()
    };
    match config.validate() {
        Ok(()) => Ok(config),
        Err(error) => Err(Failure::new(Kind::Config, error.to_string())
            .hint("see [transport] in config/hearthnet.toml")),
    }
}
