//! Limits and deadlines of a session, with the defaults of the specification; limits of a path with
//! plain sockets.

use std::time::Duration;

/// Smallest chunk size that can be negotiated: smaller ones would let headers outweigh data.
pub(crate) const MIN_CHUNK_BYTES: u32 = 4 * 1024;
/// Largest chunk size that can be negotiated.
pub(crate) const MAX_CHUNK_BYTES: u32 = 16 * 1024 * 1024;
/// Largest window, including later grants: 1,024 chunks.
pub(crate) const MAX_WINDOW_CHUNKS: u32 = 1024;
/// Largest interval of receipts that can be negotiated, in positions.
pub(crate) const MAX_RECEIPT_POSITIONS: u32 = 65_536;
/// Largest control message (header included), and largest message of any kind before HELLO.
pub(crate) const CONTROL_MESSAGE_BYTES: usize = 4 * 1024;

/// Limits and deadlines of one session. `Default` gives the values of the specification.
///
/// ```
/// let config = hearthnet_transport::Config { max_sessions: 4, ..Default::default() };
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// Data bytes per tensor chunk, 4 KiB to 16 MiB. The smaller value of the two sides is used.
    pub chunk_bytes: u32,
    /// Limit of unacknowledged chunks from the peer, 1 to 1,024.
    pub window_chunks: u32,
    /// Receive buffer for tensors in bytes, at least one chunk. Also the size of the largest tensor
    /// that this side accepts.
    pub recv_buffer_bytes: u32,
    /// Bytes of tensors that may wait for credit before `send` waits as well.
    pub send_buffer_bytes: u32,
    /// Row blocks up to this many bytes travel inside their step, 1 KiB to 1 MiB. The smaller value
    /// of the two sides is used.
    pub inline_max: u32,
    /// Tensors larger than this many bytes are offered to zstd; `None` disables compression.
    pub compress_above: Option<u32>,
    /// Limit of unanswered steps from the peer, 1 to 65,535.
    pub max_steps_in_flight: u32,
    /// Limit of steps of one stream that wait, at least 1. Announced only: the application that
    /// answers the steps enforces it.
    pub stream_steps: u32,
    /// Limit of steps of all streams of one caller that wait, over all its sessions, at least 1.
    /// Announced only, too.
    pub caller_steps: u32,
    /// Positions of a stream between two receipts of its host, at most 65,536; 0: none. The larger
    /// value of the two sides is used, none if either has none.
    pub receipts: u32,
    /// Silence after which a PING is sent. After twice this time the session is closed.
    pub keep_alive: Duration,
    /// Lifetime of a session. The smaller value of the two sides is used.
    pub session_lifetime: Duration,
    /// Limit of open sessions of a listener.
    pub max_sessions: usize,
    /// Limit of open sessions per peer, counted with its [quota
    /// group](crate::Admission::counts_with).
    pub max_sessions_per_peer: usize,
    /// Limit of a listener's connections between accept and HELLO. At most half of them may come
    /// from addresses at which no admitted peer was recently. Admitted peers with a proved key may
    /// have as many more. When the limit is exceeded, an older connection is closed.
    pub max_handshakes: usize,
    /// Limit of such connections per remote address, and per peer.
    pub max_handshakes_per_address: usize,
    /// Rate of stream opens of a peer per second; bursts of up to four seconds' worth are allowed.
    pub stream_opens_per_second: u32,
    /// Rate of control frames (open, close, truncate, grants) per second, with the same burst.
    pub control_frames_per_second: u32,
    /// Read buffer of tungstenite in bytes. It zeroes the whole buffer on each read.
    pub read_buffer_bytes: usize,
    pub deadlines: Deadlines,
}

/// Deadline of each phase of a connection.
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
    /// Span over which `min_rate` is measured while a message or tensor is incomplete.
    pub stall: Duration,
    /// How long the peer may withhold credit while tensors wait for it.
    pub credit: Duration,
    /// Minimum bytes per second of a message or tensor that has begun.
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
            stream_steps: 32,
            caller_steps: 128,
            receipts: 64,
            keep_alive: Duration::from_secs(30),
            session_lifetime: Duration::from_secs(3600),
            max_sessions: 64,
            // Enough for one per calling program of a machine. Four peers together can take all.
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
    pub setting: &'static str,
    /// Rule that the value breaks.
    pub rule: &'static str,
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ConfigError`] for the first setting out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |value: u32, least: u32, most: u32| (least..=most).contains(&value);
        let chunk = within(self.chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
        let window = within(self.window_chunks, 1, MAX_WINDOW_CHUNKS);
        let recv_buffer = self.recv_buffer_bytes >= self.chunk_bytes;
        let inline = within(self.inline_max, 1024, 1024 * 1024);
        let steps = within(self.max_steps_in_flight, 1, 65_535);
        let receipts = self.receipts <= MAX_RECEIPT_POSITIONS;
        let read_buffer = (1024..=1024 * 1024).contains(&self.read_buffer_bytes);
        let in_range = [
            ("chunk_bytes", chunk, "4 KiB to 16 MiB"),
            ("window_chunks", window, "1 to 1024"),
            ("recv_buffer_bytes", recv_buffer, "at least chunk_bytes"),
            ("inline_max", inline, "1 KiB to 1 MiB"),
            ("max_steps_in_flight", steps, "1 to 65535"),
            ("receipts", receipts, "at most 65536"),
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
            ("stream_steps", self.stream_steps as usize),
            ("caller_steps", self.caller_steps as usize),
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

/// A path of the listener whose WebSocket carries messages of the application's own protocol.
///
/// The connection is secured like that of the tensor path: mutual TLS with pinned Ed25519 keys, a
/// deadline for each phase, a frame limiter below the WebSocket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathRule {
    /// Path of the upgrade request, such as `/bus/v1`.
    pub path: &'static str,
    /// Limit of a message in bytes, in both directions.
    pub max_message_bytes: usize,
    /// Whether text messages are allowed; binary ones always are.
    pub text: bool,
    /// Limit of open sockets on this path.
    pub max_sockets: usize,
    /// Limit of open sockets per peer.
    pub max_sockets_per_peer: usize,
    /// Limit of open sockets of [strangers](crate::Admission::belongs). For a further one, the
    /// oldest of the address with most is closed.
    pub max_strangers: usize,
    /// Queue length in each direction. When the queue of incoming messages is full, reading stops.
    pub queue_messages: usize,
    /// Queue size in bytes; a single message is always accepted.
    pub queue_bytes: usize,
    /// Whether the sockets are driven by the low-priority threads ([`background`](crate::background)).
    pub low_priority: bool,
}

impl PathRule {
    /// Binary messages of up to `max_message_bytes`; 64 sockets, 4 per peer; queues of 64 messages
    /// that hold at most two of the largest.
    pub fn new(path: &'static str, max_message_bytes: usize) -> PathRule {
        PathRule {
            path,
            max_message_bytes,
            text: false,
            max_sockets: 64,
            max_sockets_per_peer: 4,
            max_strangers: 64,
            queue_messages: 64,
            queue_bytes: max_message_bytes.saturating_mul(2),
            low_priority: false,
        }
    }

    /// Allows text messages.
    #[must_use]
    pub fn with_text(mut self) -> PathRule {
        self.text = true;
        self
    }

    /// Limit of open sockets per quota group, however many keys it has: a quarter of all, and at
    /// least one peer's limit.
    pub(crate) fn max_sockets_per_party(&self) -> usize {
        (self.max_sockets / 4).max(self.max_sockets_per_peer)
    }

    /// Sets the limit of open sockets, in all and per peer.
    #[must_use]
    pub fn with_sockets(mut self, in_all: usize, per_peer: usize) -> PathRule {
        self.max_sockets = in_all;
        self.max_sockets_per_peer = per_peer;
        self.max_strangers = in_all;
        self
    }

    /// Drives the sockets on the low-priority threads, for bulk data: the cost of TLS then falls on
    /// those.
    #[must_use]
    pub fn with_low_priority(mut self) -> PathRule {
        self.low_priority = true;
        self
    }

    /// Sets the limit of open sockets of strangers.
    #[must_use]
    pub fn with_strangers(mut self, most: usize) -> PathRule {
        self.max_strangers = most;
        self
    }
}
