//! Configuration of a host.

use std::time::Duration;

use hearthnet_bus::{MAX_CLOCK_SKEW_SECS, NodeId};

use crate::fault::StartError;

/// Settings that do not depend on the model. [`ServeConfig::new`] fills in the defaults.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Listen address, `host:port`; port 0 picks a free one.
    pub listen: String,
    /// Address in the descriptor. Default: the listen address.
    pub endpoint: Option<String>,
    /// Nodes that may connect, and may issue grants. The host's own key always may.
    pub admitted: Vec<NodeId>,
    /// Limit of open streams over all connections. Default 8, at least 1.
    pub max_concurrent_streams: u32,
    /// Limit of open streams of one caller, over all its connections. Default: no limit of its own.
    pub max_streams_per_caller: u32,
    /// Limit of positions per stream. Default: the model's context length.
    pub max_positions: Option<u32>,
    /// Bytes of KV for all streams together. Default 1 GiB. Streams get it by pages, as they grow;
    /// when it runs out, one of them is preempted.
    pub kv_budget_bytes: u64,
    /// Share of the KV budget that the streams of one caller may hold, in per cent. Default 100.
    pub kv_share_per_caller: u32,
    /// Steps that one stream may have waiting. Default 32: enough for prefill chunks to
    /// overlap across hosts. At least 1.
    pub max_waiting_steps: u32,
    /// Steps that all streams of one caller may have waiting. Default 128. At least 1.
    pub max_waiting_steps_per_caller: u32,
    /// How long a prefill chunk may delay a decode step. Default 25 ms.
    pub prefill_piece: Duration,
    /// Niceness of the engine's threads, 0 to 19, so that other programs and this host's own
    /// network tasks are scheduled first. Default 5. Linux only.
    pub niceness: i32,
    /// Idle time after which a stream is closed. Default 300 s.
    pub stream_idle: Duration,
    /// Time without streams after which the weights are unloaded. Default 600 s; `None`: never.
    pub evict_after: Option<Duration>,
    /// Tolerated clock difference between two nodes, in seconds. Default 30, at most 300.
    pub clock_skew_secs: u64,
    /// Software in the descriptor: products with versions, separated by spaces. For a model file,
    /// the host appends the file's text id.
    pub software: String,
    /// Limits and deadlines of sessions. A session is closed when more unread answers than the send
    /// buffer pile up.
    pub transport: hearthnet_transport::Config,
}

impl ServeConfig {
    /// Listens on `listen` and admits the host's own key only.
    pub fn new(listen: impl Into<String>) -> Self {
        Self {
            listen: listen.into(),
            endpoint: None,
            admitted: Vec::new(),
            max_concurrent_streams: 8,
            max_streams_per_caller: u32::MAX,
            max_positions: None,
            kv_budget_bytes: 1 << 30,
            kv_share_per_caller: 100,
            max_waiting_steps: 32,
            max_waiting_steps_per_caller: 128,
            prefill_piece: Duration::from_millis(25),
            niceness: 5,
            stream_idle: Duration::from_secs(300),
            evict_after: Some(Duration::from_secs(600)),
            clock_skew_secs: 30,
            software: concat!("hearthnet/", env!("CARGO_PKG_VERSION")).to_owned(),
            transport: hearthnet_transport::Config::default(),
        }
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// [`StartError::Setting`] for the first setting out of range.
    pub(crate) fn validate(&self) -> Result<(), StartError> {
        let check = |holds: bool, setting, rule| match holds {
            true => Ok(()),
            false => Err(StartError::Setting { setting, rule }),
        };
        let positive = |value: u32, setting| check(value > 0, setting, "must be at least 1");
        positive(self.max_concurrent_streams, "max_concurrent_streams")?;
        positive(self.max_streams_per_caller, "max_streams_per_caller")?;
        positive(self.max_positions.unwrap_or(1), "max_positions")?;
        positive(self.max_waiting_steps, "max_waiting_steps")?;
        let (steps, name) = (
            self.max_waiting_steps_per_caller,
            "max_waiting_steps_per_caller",
        );
        positive(steps, name)?;
        let share = (1..=100).contains(&self.kv_share_per_caller);
        check(
            share,
            "kv_share_per_caller",
            "must lie between 1 and 100 per cent",
        )?;
        let niceness = (0..=19).contains(&self.niceness);
        check(niceness, "niceness", "must lie between 0 and 19")?;
        check(
            !self.stream_idle.is_zero(),
            "stream_idle",
            "must not be zero",
        )?;
        let skew = self.clock_skew_secs <= MAX_CLOCK_SKEW_SECS;
        check(skew, "clock_skew_secs", "must be at most 300 seconds")
    }
}
