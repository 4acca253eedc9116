//! Body of the fuzz target `pipeline`, also used by a property test. Not a public interface.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use hearthnet_transport::Want;

use super::{Action, Chunk, Limits, Pipeline};

/// Layers of the model.
pub(super) const LAYERS: u32 = 6;

/// Reads bytes as the settings of a conversation (8 bytes), then its turns (a byte with their number;
/// for each the positions to go back and the number of rows), then as decisions: which host answers
/// next, which one fails, how far one goes back.
///
/// # Panics
/// If a row is lost, comes twice, or differs from that of one host that never fails.
#[cfg(feature = "fuzzing")]
pub fn conversation(input: &[u8]) {
    let mut input = input.iter().copied();
    let mut below = |n: u32| input.next().map_or(0, |byte| u32::from(byte) % n.max(1));
    let cuts = (0..below(3)).map(|_| 1 + below(LAYERS - 1)).collect();
    let limits = Limits {
        depth: 1 + below(3) as usize,
        chunk_rows: 1 + below(4) as usize,
        history_bytes: match below(121) as usize {
            120 => usize::MAX,
            bytes => bytes,
        },
    };
    let (part, back) = (1 + below(8) as usize, below(2));
    let checkpoints = below(5);
    let turns = (0..1 + below(5)).map(|turn| {
        let (back, rows) = (below(6), 1 + below(8));
        (back, (0..rows).map(|row| 100 * turn + row).collect())
    });
    let conversation = Conversation {
        cuts,
        turns: turns.collect(),
        limits,
        part,
        back: if back == 0 { Want::Last } else { Want::All },
        checkpoints: (checkpoints > 0).then_some(checkpoints),
    };
    conversation.check(&mut below);
}

/// Turns of a chat, and hosts that run its layers.
pub(super) struct Conversation {
    /// Layers at which a new host begins.
    pub(super) cuts: Vec<u32>,
    /// Turns: positions to go back, and the new rows.
    pub(super) turns: Vec<(u32, Vec<u32>)>,
    pub(super) limits: Limits,
    /// Rows that are submitted at a time.
    pub(super) part: usize,
    /// Rows returned per turn.
    pub(super) back: Want,
    /// Hosts tell how far they went back: to where they were asked to, or to a multiple of this.
    pub(super) checkpoints: Option<u32>,
}

impl Conversation {
    /// Compares the rows that come out of hosts that fail as `chaos` decides with those of one host
    /// that does not fail. `chaos` returns a number below its argument, and 0 at last.
    ///
    /// # Panics
    /// If they differ.
    pub(super) fn check(&self, chaos: &mut dyn FnMut(u32) -> u32) {
        assert_eq!(self.disturbed(chaos), self.undisturbed());
    }

    fn undisturbed(&self) -> Vec<u32> {
        let mut all = Stream::new(0..LAYERS, 1);
        let (mut length, mut out) = (0u32, Vec::new());
        for (back, values) in &self.turns {
            let position = length - back.min(&length);
            length = position + values.len() as u32;
            let rows = all.run(position, &rows(values));
            let first = match self.back {
                Want::All => 0,
                _ => rows.len() - 1,
            };
            out.extend(&rows[first..]);
        }
        out
    }

    fn streams(&self) -> Vec<Stream> {
        let mut cuts = self.cuts.clone();
        cuts.push(LAYERS);
        cuts.sort_unstable();
        cuts.dedup();
        let starts = std::iter::once(0).chain(cuts.clone());
        starts
            .zip(cuts)
            .map(|(lo, hi)| Stream::new(lo..hi, 1))
            .collect()
    }

    fn disturbed(&self, chaos: &mut dyn FnMut(u32) -> u32) -> Vec<u32> {
        let mut streams = self.streams();
        let mut p = Pipeline::new(streams.len(), 4, self.back, self.limits);
        // Otherwise earlier rows come back.
        let may_redo = self.back == Want::Last;
        let (mut length, mut outputs) = (0u32, Vec::new());
        for (back, values) in &self.turns {
            let mut position = length - back.min(&length);
            let mut rest = values.as_slice();
            let mut done = false;
            while !done {
                if !rest.is_empty() && (position == length || p.is_idle()) {
                    let (now, later) = rest.split_at(self.part.min(rest.len()));
                    let goes_back = position < length;
                    p.submit(position, rows(now), later.len() as u32);
                    if goes_back && self.checkpoints.is_some() {
                        (0..streams.len()).for_each(|span| p.hold(span, position));
                    }
                    position += now.len() as u32;
                    (length, rest) = (position, later);
                }
                let submitted = rest.is_empty();
                while let Some(action) = p.poll() {
                    match action {
                        Action::Send {
                            span,
                            epoch,
                            chunk,
                            want,
                        } => {
                            assert_eq!(
                                epoch, streams[span].epoch,
                                "sent to a stream that is not open"
                            );
                            streams[span].steps.push_back((chunk, want));
                            assert!(streams[span].steps.len() <= self.limits.depth);
                            assert_eq!(p.returns_to(span), None, "sent to a held span");
                        }
                        Action::Output { row } => {
                            outputs.extend(values_of(&row));
                            done = p.is_through();
                            assert!(done <= submitted, "through before all was there");
                        }
                    }
                }
                if chaos(5) == 1 {
                    replace(&mut p, &mut streams, may_redo, chaos);
                    continue;
                }
                let held = (0..streams.len()).filter_map(|i| Some((i, p.returns_to(i)?)));
                let held: Vec<(usize, u32)> = held.collect();
                if let Some(&(span, asked)) = held.get(chaos(held.len() as u32 + 1) as usize) {
                    let every = self.checkpoints.unwrap_or(1);
                    let kept = [asked, asked - asked % every, 0][chaos(3) as usize];
                    for state in &mut streams[span].states {
                        state.truncate(kept as usize);
                    }
                    if !p.kept(span, kept) {
                        for index in p.replace(span, 1) {
                            streams[index] = Stream::new(streams[index].layers(), p.epoch(index));
                        }
                    }
                    continue;
                }
                let busy: Vec<usize> = (0..streams.len())
                    .filter(|&i| !streams[i].steps.is_empty())
                    .collect();
                if busy.is_empty() {
                    assert!(
                        done || !submitted || !held.is_empty(),
                        "nothing is under way, and nothing came out"
                    );
                    continue;
                }
                let span = busy[chaos(busy.len() as u32) as usize];
                let epoch = streams[span].epoch;
                let (position, rows, data) = streams[span].answer();
                let taken = p.on_result(span, epoch, position, rows, data);
                assert!(taken.is_ok(), "{taken:?}");
            }
        }
        outputs
    }
}

/// Replaces a host by one or two others, or lets all behind it run again.
fn replace(
    p: &mut Pipeline,
    streams: &mut Vec<Stream>,
    may_redo: bool,
    chaos: &mut dyn FnMut(u32) -> u32,
) {
    let dead = chaos(streams.len() as u32) as usize;
    let layers = streams[dead].layers();
    let count = 1 + chaos(2.min(layers.len() as u32)) as usize;
    let reopened = match may_redo && chaos(3) == 1 {
        true => p.redo(dead, count),
        false => p.replace(dead, count),
    };
    let epoch = p.epoch(dead);
    let fresh = if count == 2 {
        let cut = layers.start + 1 + chaos(layers.len() as u32 - 1);
        vec![
            Stream::new(layers.start..cut, epoch),
            Stream::new(cut..layers.end, epoch),
        ]
    } else {
        vec![Stream::new(layers, epoch)]
    };
    streams.splice(dead..=dead, fresh);
    for index in reopened {
        streams[index] = Stream::new(streams[index].layers(), p.epoch(index));
    }
}

/// Stream of a host: layers with their state, and unanswered steps.
struct Stream {
    lo: u32,
    states: Vec<Vec<u32>>,
    epoch: u32,
    steps: VecDeque<(Chunk, Want)>,
}

impl Stream {
    fn new(layers: Range<u32>, epoch: u32) -> Self {
        Self {
            lo: layers.start,
            states: layers.map(|_| Vec::new()).collect(),
            epoch,
            steps: VecDeque::new(),
        }
    }

    fn layers(&self) -> Range<u32> {
        self.lo..self.lo + self.states.len() as u32
    }

    fn run(&mut self, position: u32, data: &[u8]) -> Vec<u32> {
        (position..)
            .zip(values_of(data))
            .map(|(position, mut row)| {
                for (number, state) in (self.lo..).zip(&mut self.states) {
                    row = layer(number, state, position, row);
                }
                row
            })
            .collect()
    }

    fn answer(&mut self) -> (u32, u32, Bytes) {
        let Some((chunk, want)) = self.steps.pop_front() else {
            unreachable!("only a busy stream answers");
        };
        let out = self.run(chunk.position, &chunk.data);
        let back = match want {
            Want::None => &[],
            Want::Last => &out[out.len() - 1..],
            Want::All => &out[..],
        };
        (chunk.position, back.len() as u32, rows(back))
    }
}

/// A block: its output depends on the layer, the position, and all rows before it.
pub(crate) fn layer(layer: u32, state: &mut Vec<u32>, position: u32, value: u32) -> u32 {
    state.truncate(position as usize);
    assert_eq!(state.len(), position as usize, "a hole in the KV");
    let before = state.last().copied().unwrap_or(layer);
    let mixed = (before ^ value.rotate_left(3))
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(layer);
    state.push(mixed);
    mixed
}

fn rows(values: &[u32]) -> Bytes {
    values.iter().flat_map(|v| v.to_be_bytes()).collect()
}

fn values_of(rows: &[u8]) -> impl Iterator<Item = u32> {
    let (values, _) = rows.as_chunks::<4>();
    values.iter().map(|bytes| u32::from_be_bytes(*bytes))
}
