//! The host's side of an engine in another process.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearthnet_files::gguf::files_of;
use hearthnet_platform::cores::SharedCore;
use hearthnet_platform::pipe::Pipe;
use hearthnet_platform::regular_file;

use super::message::{
    CLOSE, DONE, FAULT, FORK, FORWARD, LOADED, Load, Malformed, Message, NOT_LOADED, OPEN,
    PROGRESS, REPLY_LIMIT, TRUNCATE, read_fault, read_load_fault, read_loaded, read_progress,
};
use crate::device::Device;
use crate::engine::{EngineSource, Footprint, LayerEngine, LoadFault, Span, StartProgress};
use crate::fault::StreamFault;

/// Starts a process that calls [`super::serve_engine`], and returns the connection to it.
pub type Connect = Box<dyn FnMut() -> io::Result<Pipe> + Send>;

/// Lost processes that are replaced within [`LOSS_WINDOW`]. A model that kills each one must not
/// keep the machine busy.
const MAX_LOSSES: usize = 3;
const LOSS_WINDOW: Duration = Duration::from_secs(600);

/// Loads layers of a model in a new process.
pub(crate) struct RemoteSource {
    path: PathBuf,
    load: Load,
    connect: Connect,
    /// Times of recent losses.
    losses: Vec<Instant>,
}

impl RemoteSource {
    pub(crate) fn new(path: PathBuf, load: Load, connect: Connect) -> Self {
        Self {
            path,
            load,
            connect,
            losses: Vec::new(),
        }
    }
}

impl EngineSource for RemoteSource {
    type Engine = RemoteEngine;

    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<RemoteEngine, LoadFault> {
        let cannot = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| LoadFault::from(format!("{what}: {error}"))
        };
        // The process can open no file itself.
        let mut files = Vec::new();
        for path in files_of(&self.path) {
            let file = regular_file::open(&path);
            let file = file.map_err(cannot(&format!("cannot open {}", path.display())))?;
            files.push(file);
        }
        let pipe = (self.connect)().map_err(cannot("cannot start the engine's process"))?;
        let mut message = Message::default();
        self.load.write(files.len() as u32, &mut message);
        let loaded = message.send(&pipe).and_then(|()| {
            files.iter().try_for_each(|file| pipe.send_file(file))?;
            loop {
                let (kind, fields) = message.receive(&pipe, REPLY_LIMIT)?;
                match kind {
                    PROGRESS => progress(read_progress(fields)?),
                    LOADED => return Ok(Ok(read_loaded(fields)?)),
                    NOT_LOADED => return Ok(Err(read_load_fault(fields)?)),
                    _ => return Err(Malformed.into()),
                }
            }
        });
        let loaded = loaded.map_err(|error| {
            LoadFault::from(format!(
                "the engine's process ended while it loaded the layers ({error}): this machine may \
                 have too little memory for them"
            ))
        });
        let (weight_bytes, footprint, card) = loaded??;
        Ok(RemoteEngine {
            pipe,
            message,
            weight_bytes,
            footprint,
            card,
            kv_bytes: 0,
            lengths: HashMap::new(),
            core: SharedCore::of_this_thread(),
            lost: false,
        })
    }

    fn may_reload(&mut self) -> bool {
        // The card may be the cause; the processor gives the same bytes.
        self.load.device = Device::Processor;
        let now = Instant::now();
        let recent = |at: &Instant| now.duration_since(*at) < LOSS_WINDOW;
        self.losses.retain(recent);
        self.losses.push(now);
        self.losses.len() <= MAX_LOSSES
    }
}

/// Engine in another process.
pub(crate) struct RemoteEngine {
    pipe: Pipe,
    message: Message,
    weight_bytes: u64,
    footprint: Footprint,
    card: Option<String>,
    kv_bytes: u64,
    /// Length of each sequence.
    lengths: HashMap<u64, u32>,
    /// Core of the calling thread: that of the process.
    core: SharedCore,
    /// The process has ended, or broke the protocol.
    lost: bool,
}

impl RemoteEngine {
    /// Sends the message and handles the reply. After a fault in `spans` their lengths are updated.
    /// The rows of a reply are read into `rows`.
    fn ask(&mut self, spans: &[Span<u64>], rows: &mut [f32]) -> Result<u64, StreamFault> {
        if self.lost {
            return Err(ended());
        }
        match self.exchange(spans, rows) {
            Ok(reply) => reply,
            Err(error) => {
                tracing::error!("the engine's process has failed: {error}");
                self.lost = true;
                self.kv_bytes = 0;
                self.lengths.clear();
                Err(ended())
            }
        }
    }

    fn exchange(
        &mut self,
        spans: &[Span<u64>],
        rows: &mut [f32],
    ) -> io::Result<Result<u64, StreamFault>> {
        self.message.send(&self.pipe)?;
        let limit = REPLY_LIMIT + size_of_val(rows) + size_of_val(spans);
        let (kind, mut fields) = self.message.receive(&self.pipe, limit)?;
        self.core.stay_on(fields.u32()?);
        let kv_bytes = fields.u64()?;
        let reply = match kind {
            DONE => {
                let value = fields.u64()?;
                fields.rows(rows)?;
                for span in spans {
                    let length = span.position.saturating_add(span.rows);
                    self.lengths.insert(span.seq, length);
                }
                Ok(value)
            }
            FAULT => {
                for span in spans {
                    self.lengths.insert(span.seq, fields.u32()?);
                }
                Err(read_fault(fields)?)
            }
            _ => return Err(Malformed.into()),
        };
        self.kv_bytes = kv_bytes;
        Ok(reply)
    }
}

fn ended() -> StreamFault {
    let reason = "its process has ended".to_owned();
    StreamFault::Internal { reason }
}

impl LayerEngine for RemoteEngine {
    type Seq = u64;

    fn open(&mut self) -> Result<u64, StreamFault> {
        self.message.start(OPEN);
        let seq = self.ask(&[], &mut [])?;
        self.lengths.insert(seq, 0);
        Ok(seq)
    }

    fn fork(&mut self, seq: u64, length: u32) -> Result<u64, StreamFault> {
        self.message.start(FORK).u64(seq).u32(length);
        let fork = self.ask(&[], &mut [])?;
        self.lengths.insert(fork, length);
        Ok(fork)
    }

    fn close(&mut self, seq: u64) {
        self.message.start(CLOSE).u64(seq);
        // A lost engine has no sequences.
        let _ = self.ask(&[], &mut []);
        self.lengths.remove(&seq);
    }

    fn len(&self, seq: u64) -> u32 {
        self.lengths.get(&seq).copied().unwrap_or(0)
    }

    fn truncate(&mut self, seq: u64, length: u32) -> Result<u32, StreamFault> {
        self.message.start(TRUNCATE).u64(seq).u32(length);
        let left = self.ask(&[], &mut [])?;
        // Never longer than asked for.
        let left = u32::try_from(left).unwrap_or(length).min(length);
        self.lengths.insert(seq, left);
        Ok(left)
    }

    fn forward(
        &mut self,
        (lo, hi): (u32, u32),
        spans: &[Span<u64>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        self.message.start(FORWARD).u32(lo).u32(hi);
        self.message.u32(spans.len() as u32);
        for span in spans {
            let Span { position, rows, .. } = *span;
            self.message.u64(span.seq).u32(position).u32(rows);
        }
        self.message.rows(x);
        self.ask(spans, x).map(drop)
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    fn footprint(&self) -> Footprint {
        self.footprint
    }

    fn kv_bytes_in_use(&self) -> u64 {
        self.kv_bytes
    }

    fn card(&self) -> Option<String> {
        self.card.clone()
    }

    /// Also notices a process that ended while nothing was computed.
    fn is_lost(&mut self) -> bool {
        self.lost = self.lost || !self.pipe.is_quiet();
        self.lost
    }
}
