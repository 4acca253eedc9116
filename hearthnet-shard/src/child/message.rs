//! Messages between a host and the process of its engine.
//!
//! The host sends the model file and [`Load`], then one request at a time; each has one reply.
//! During a load any number of [`PROGRESS`] messages come before it. A message is its length (u32),
//! its kind (u8) and its fields. All numbers are little-endian; rows are f32.
//!
//! | request | fields | reply |
//! |---|---|---|
//! | `LOAD` | see [`Load`] | `LOADED` or `NOT_LOADED` |
//! | `OPEN` | | `DONE` with the id of the sequence |
//! | `FORK` | sequence u64, length u32 | `DONE` with the id of the new sequence |
//! | `CLOSE` | sequence u64 | `DONE` |
//! | `TRUNCATE` | sequence u64, length u32 | `DONE` with the length that is left |
//! | `FORWARD` | first and last layer u32, number of spans u32; for each span sequence u64, position u32, rows u32; all rows | `DONE`, then all rows |
//!
//! | reply | fields |
//! |---|---|
//! | `PROGRESS` | phase u8, bytes done u64, bytes in all u64 |
//! | `LOADED` | bytes of weights u64; footprint: per sequence u64, per position u64, page u32; name of the graphics card, empty for the processor |
//! | `NOT_LOADED` | resource u8, reason |
//! | `DONE` | core of the engine's thread u32, bytes of KV in use u64, value u64 |
//! | `FAULT` | core u32, bytes of KV in use u64; after `FORWARD` the length of each span's sequence u32; the fault |

use std::io::{self, Read, Write as _};
use std::ops::Range;

use hearthnet_engine::EngineOptions;
use hearthnet_platform::pipe::Pipe;

use crate::device::Device;
use crate::engine::{Footprint, LoadFault, LoadPhase, StartProgress};
use crate::fault::{Resource, StreamFault};

pub(super) const LOAD: u8 = 1;
pub(super) const OPEN: u8 = 2;
pub(super) const CLOSE: u8 = 3;
pub(super) const TRUNCATE: u8 = 4;
pub(super) const FORWARD: u8 = 5;
pub(super) const FORK: u8 = 6;

pub(super) const PROGRESS: u8 = 17;
pub(super) const LOADED: u8 = 18;
pub(super) const NOT_LOADED: u8 = 19;
pub(super) const DONE: u8 = 20;
pub(super) const FAULT: u8 = 21;

/// Limit of a reply without its rows.
pub(super) const REPLY_LIMIT: usize = 64 << 10;
/// Limit of the text of a fault.
const TEXT_LIMIT: usize = 4 << 10;

/// A message that is too short, or has a value that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed message")]
pub(super) struct Malformed;

impl From<Malformed> for io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// Message that is written or was read. Its memory is reused, and its content wiped.
#[derive(Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Begins a message.
    pub(super) fn start(&mut self, kind: u8) -> &mut Self {
        self.wipe();
        // The length is set when the message is sent.
        self.0.extend([0; 4]);
        self.u8(kind)
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn rows(&mut self, rows: &[f32]) -> &mut Self {
        let start = self.0.len();
        self.0.resize(start + size_of_val(rows), 0);
        let (_, to) = self.0.split_at_mut(start);
        for (to, from) in to.as_chunks_mut().0.iter_mut().zip(rows) {
            *to = from.to_le_bytes();
        }
        self
    }

    /// Sends the message, and wipes it.
    pub(super) fn send(&mut self, mut pipe: &Pipe) -> io::Result<()> {
        let too_long = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let length = u32::try_from(self.0.len().saturating_sub(4)).map_err(too_long)?;
        if let Some(to) = self.0.first_chunk_mut() {
            *to = length.to_le_bytes();
        }
        let sent = pipe.write_all(&self.0);
        self.wipe();
        sent
    }

    /// Receives a message of at most `limit` bytes: its kind and its fields.
    pub(super) fn receive(
        &mut self,
        mut pipe: &Pipe,
        limit: usize,
    ) -> io::Result<(u8, Fields<'_>)> {
        self.wipe();
        let mut length = [0; 4];
        pipe.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > limit {
            return Err(Malformed.into());
        }
        self.0.resize(length, 0);
        pipe.read_exact(&mut self.0)?;
        let mut fields = Fields::new(&self.0);
        Ok((fields.u8()?, fields))
    }

    fn wipe(&mut self) {
        wipe(&mut self.0);
    }
}

/// Overwrites and empties memory that is used again. `zeroize` writes single values, which takes
/// several times as long.
pub(super) fn wipe<T: Copy + Default>(values: &mut Vec<T>) {
    values.fill(T::default());
    std::hint::black_box(values.as_mut_slice());
    values.clear();
}

/// Fields of a message that are not read yet.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// All that is left.
    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Text after its length.
    fn short_text(&mut self) -> Result<&'a str, Malformed> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| Malformed)
    }

    pub(super) fn text(self) -> String {
        String::from_utf8_lossy(self.0.get(..TEXT_LIMIT).unwrap_or(self.0)).into_owned()
    }

    /// Reads rows, which must fill the rest of the message.
    pub(super) fn rows(self, rows: &mut [f32]) -> Result<(), Malformed> {
        let (from, odd) = self.0.as_chunks();
        if from.len() != rows.len() || !odd.is_empty() {
            return Err(Malformed);
        }
        for (to, from) in rows.iter_mut().zip(from) {
            *to = f32::from_le_bytes(*from);
        }
        Ok(())
    }
}

/// Request to load layers of the file that came before.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    /// Layers, half-open.
    pub(crate) range: Range<u32>,
    /// Niceness of the engine's threads.
    pub(crate) niceness: i32,
    pub(crate) options: EngineOptions,
    pub(crate) device: Device,
    /// Manifest that the file must match, encoded.
    pub(crate) manifest: Vec<u8>,
}

impl Load {
    /// `files` are sent after the message.
    pub(super) fn write(&self, files: u32, to: &mut Message) {
        let options = &self.options;
        let isa: &str = options.isa.into();
        to.start(LOAD).u32(files);
        to.u32(self.range.start).u32(self.range.end);
        to.u32(self.niceness.unsigned_abs());
        to.u64(options.threads as u64).u64(options.max_kv_bytes);
        to.u64(options.max_sequences as u64);
        to.u32(options.max_context.unwrap_or(u32::MAX));
        let device = self.device.to_string();
        for text in [isa, &device] {
            to.u32(text.len() as u32).bytes(text.as_bytes());
        }
        to.bytes(&self.manifest);
    }

    /// Number of files that follow, and the request.
    pub(super) fn read(mut from: Fields<'_>) -> Result<(u32, Self), Malformed> {
        let files = from.u32()?;
        let range = from.u32()?..from.u32()?;
        let niceness = i32::try_from(from.u32()?).map_err(|_| Malformed)?;
        let mut size = || from.u64();
        let (threads, max_kv_bytes, sequences) = (size()?, size()?, size()?);
        let size = |value: u64| usize::try_from(value).map_err(|_| Malformed);
        let max_context = Some(from.u32()?).filter(|&most| most < u32::MAX);
        let (isa, device) = (from.short_text()?, from.short_text()?);
        let options = EngineOptions {
            threads: size(threads)?,
            isa: isa.parse().map_err(|_| Malformed)?,
            max_kv_bytes,
            max_sequences: size(sequences)?,
            max_context,
        };
        let manifest = from.rest().to_vec();
        let load = Self {
            range,
            niceness,
            options,
            device: device.parse().map_err(|_| Malformed)?,
            manifest,
        };
        Ok((files, load))
    }
}

pub(super) fn write_progress(step: StartProgress, to: &mut Message) {
    to.start(PROGRESS).u8(step.phase as u8);
    to.u64(step.done).u64(step.total);
}

pub(super) fn read_progress(mut from: Fields<'_>) -> Result<StartProgress, Malformed> {
    Ok(StartProgress {
        phase: LoadPhase::from_repr(from.u8()?).ok_or(Malformed)?,
        done: from.u64()?,
        total: from.u64()?,
    })
}

pub(super) fn write_load_fault(fault: &LoadFault, to: &mut Message) {
    let resource = fault.too_little.map_or(0, |resource| resource as u8);
    to.start(NOT_LOADED).u8(resource).bytes(cut(&fault.reason));
}

pub(super) fn read_load_fault(mut from: Fields<'_>) -> Result<LoadFault, Malformed> {
    let too_little = match from.u8()? {
        0 => None,
        number => Some(Resource::from_repr(number).ok_or(Malformed)?),
    };
    let reason = from.text();
    Ok(LoadFault { reason, too_little })
}

/// Bytes of weights, memory of a sequence, and the graphics card.
pub(super) fn read_loaded(
    mut from: Fields<'_>,
) -> Result<(u64, Footprint, Option<String>), Malformed> {
    let weight_bytes = from.u64()?;
    let footprint = Footprint {
        per_sequence: from.u64()?,
        per_position: from.u64()?,
        page: from.u32()?,
    };
    match footprint.page {
        0 => Err(Malformed),
        _ => {
            let card = Some(from.text()).filter(|name| !name.is_empty());
            Ok((weight_bytes, footprint, card))
        }
    }
}

/// Writes a fault of an engine. One that no engine has is written as an internal one.
pub(super) fn write_fault(fault: &StreamFault, to: &mut Message) {
    match fault {
        StreamFault::PositionGap { position, length } => to.u8(1).u32(*position).u32(*length),
        StreamFault::ContextFull { max } => to.u8(2).u32(*max),
        StreamFault::KvFull => to.u8(3),
        StreamFault::TensorNonFinite => to.u8(4),
        StreamFault::BoundaryOverflow { layer } => to.u8(5).u32(*layer),
        StreamFault::Internal { reason } => to.u8(0).bytes(cut(reason)),
        other => to.u8(0).bytes(cut(&other.to_string())),
    };
}

pub(super) fn read_fault(mut from: Fields<'_>) -> Result<StreamFault, Malformed> {
    Ok(match from.u8()? {
        0 => StreamFault::Internal {
            reason: from.text(),
        },
        1 => StreamFault::PositionGap {
            position: from.u32()?,
            length: from.u32()?,
        },
        2 => StreamFault::ContextFull { max: from.u32()? },
        3 => StreamFault::KvFull,
        4 => StreamFault::TensorNonFinite,
        5 => StreamFault::BoundaryOverflow { layer: from.u32()? },
        _ => return Err(Malformed),
    })
}

fn cut(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    bytes.get(..TEXT_LIMIT).unwrap_or(bytes)
}
