//! Limits and deadlines of a session, with the defaults of the specification.

use std::time::Duration;

/// Smallest chunk size that can be negotiated: smaller ones would let headers outweigh data.
pub(crate) const MIN_CHUNK_BYTES: u32 = 4 * 1024;
/// Largest chunk size that can be negotiated.
pub(crate) const MAX_CHUNK_BYTES: u32 = 16 * 1024 * 1024;
/// Largest window, however it is granted: 1,024 chunks.
pub(crate) const MAX_WINDOW_CHUNKS: u32 = 1024;
/// Largest control message (header included), and largest message of any kind before HELLO.
pub(crate) const CONTROL_MESSAGE_BYTES: usize = 4 * 1024;

/// Limits and deadlines of one session. `Default` is what the specification names.
///
/// ```
/// let config = hearthnet_transport::Config { max_sessions: 4, ..Default::default() };
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// Data bytes per tensor chunk, 4 KiB to 16 MiB. The smaller of both sides' is used.
    pub chunk_bytes: u32,
    /// Chunks that the peer may have unacknowledged, 1 to 1,024.
    pub window_chunks: u32,
    /// Bytes of tensors that the peer may have in our hands, at least one chunk. Also the largest
    /// tensor that this side takes.
    pub recv_buffer_bytes: u32,
    /// Bytes of tensors that wait here for credit before `send` waits as well.
    pub send_buffer_bytes: u32,
    /// Row blocks up to this many bytes travel inside their step, 1 KiB to 1 MiB. The smaller of
    /// both sides' is used.
    pub inline_max: u32,
    /// Tensors of more bytes than this are offered to zstd; `None` switches compression off.
    pub compress_above: Option<u32>,
    /// Steps that the peer may have unanswered, 1 to 65,535.
    pub max_steps_in_flight: u32,
    /// Silence after which a PING is sent. After twice as long the peer is given up.
    pub keep_alive: Duration,
    /// How long a session lives. The smaller of both sides' is used.
    pub session_lifetime: Duration,
    /// Sessions that a listener serves at a time.
    pub max_sessions: usize,
    /// The same for one peer, and those that it [counts with](crate::Admission::counts_with).
    pub max_sessions_per_peer: usize,
    /// Connections that a listener lets stand between accept and HELLO, in all: half of them from
    /// addresses at which no admitted peer was of late. Admitted peers, from when they have proved
    /// their key, may have as many more. For one beyond that an older one is closed.
    pub max_handshakes: usize,
    /// The same per remote address, and per peer.
    pub max_handshakes_per_address: usize,
    /// Streams that a peer may open per second, over time; it may save up four seconds' worth.
    pub stream_opens_per_second: u32,
    /// Control frames (open, close, truncate, grants) per second, over time; as above.
    pub control_frames_per_second: u32,
    /// Bytes that tungstenite reads at a time. It zeroes that much on each read.
    pub read_buffer_bytes: usize,
    /// Deadlines of the phases of a connection.
    pub deadlines: Deadlines,
}

/// How long each phase of a connection may last.
#[derive(Clone, Debug)]
pub struct Deadlines {
    /// TCP connect.
    pub connect: Duration,
    /// TLS handshake.
    pub tls: Duration,
    /// WebSocket upgrade.
    pub upgrade: Duration,
    /// From the upgrade to the peer's HELLO.
    pub hello: Duration,
    /// While a message or tensor is incomplete: the span over which `min_rate` is measured.
    pub stall: Duration,
    /// How long the peer may withhold credit while tensors wait for it.
    pub credit: Duration,
    /// Least bytes per second of a message or tensor that has begun.
    pub min_rate: u32,
    /// How long a closing session waits for the peer's close frame.
    pub close: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            chunk_bytes: 1024 * 1024,
            window_chunks: 16,
            recv_buffer_bytes: 64 * 1024 * 1024,
            send_buffer_bytes: 64 * 1024 * 1024,
            inline_max: 64 * 1024,
            compress_above: Some(64 * 1024),
            max_steps_in_flight: 64,
            keep_alive: Duration::from_secs(30),
            session_lifetime: Duration::from_secs(3600),
            max_sessions: 64,
            // One for each program that asks, on one machine. Four peers together can take all.
            max_sessions_per_peer: 16,
            max_handshakes: 64,
            max_handshakes_per_address: 16,
            stream_opens_per_second: 64,
            control_frames_per_second: 1024,
            read_buffer_bytes: 32 * 1024,
            deadlines: Deadlines::default(),
        }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines {
            connect: Duration::from_secs(5),
            tls: Duration::from_secs(5),
            upgrade: Duration::from_secs(5),
            hello: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            credit: Duration::from_secs(30),
            min_rate: 16 * 1024,
            close: Duration::from_secs(1),
        }
    }
}

/// A [`Config`] value outside its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("transport setting `{setting}` is out of range: {rule}")]
#[non_exhaustive]
pub struct ConfigError {
    /// Name of the field.
    pub setting: &'static str,
    /// What it has to satisfy.
    pub rule: &'static str,
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |value: u32, least: u32, most: u32| (least..=most).contains(&value);
        let chunk = within(self.chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
        let window = within(self.window_chunks, 1, MAX_WINDOW_CHUNKS);
        let recv_buffer = self.recv_buffer_bytes >= self.chunk_bytes;
        let inline = within(self.inline_max, 1024, 1024 * 1024);
        let steps = within(self.max_steps_in_flight, 1, 65_535);
        let read_buffer = (1024..=1024 * 1024).contains(&self.read_buffer_bytes);
        let in_range = [
            ("chunk_bytes", chunk, "4 KiB to 16 MiB"),
            ("window_chunks", window, "1 to 1024"),
            ("recv_buffer_bytes", recv_buffer, "at least chunk_bytes"),
            ("inline_max", inline, "1 KiB to 1 MiB"),
            ("max_steps_in_flight", steps, "1 to 65535"),
            ("read_buffer_bytes", read_buffer, "1 KiB to 1 MiB"),
        ];
        let (opens, frames) = (
            self.stream_opens_per_second as usize,
            self.control_frames_per_second as usize,
        );
        let counts = [
            ("max_sessions", self.max_sessions),
            ("max_sessions_per_peer", self.max_sessions_per_peer),
            ("max_handshakes", self.max_handshakes),
            (
                "max_handshakes_per_address",
                self.max_handshakes_per_address,
            ),
            ("stream_opens_per_second", opens),
            ("control_frames_per_second", frames),
        ];
        let d = &self.deadlines;
        let times = [
            ("keep_alive", self.keep_alive),
            ("session_lifetime", self.session_lifetime),
            ("deadlines.connect", d.connect),
            ("deadlines.tls", d.tls),
            ("deadlines.upgrade", d.upgrade),
            ("deadlines.hello", d.hello),
            ("deadlines.stall", d.stall),
            ("deadlines.credit", d.credit),
            ("deadlines.close", d.close),
        ];
        let counts = counts.map(|(setting, count)| (setting, count >= 1, "at least 1"));
        let times = times.map(|(setting, time)| (setting, !time.is_zero(), "more than zero"));
        for (setting, holds, rule) in in_range.into_iter().chain(counts).chain(times) {
            if !holds {
                return Err(ConfigError { setting, rule });
            }
        }
        Ok(())
    }
}
