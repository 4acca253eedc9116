//! Hosts that lie in every answer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_engine::{Engine, SeqId, Span};
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{Gguf, ModelFile, quantize};
use hearthnet_testkit::{FullModel, Passing, Tamper, encoded, one_thread, rewritten};
use serde::Serialize;

use crate::Result;
use crate::fleet::{Fleet, PROMPT, TOKENS};

/// First layers, which the caller runs itself as by default.
pub(super) const PRIVATE: u32 = 2;

/// Positions that a host with a truncated context remembers.
const CONTEXT: usize = 16;
/// Layer that a host skips.
const SKIPPED: u32 = 3;
/// Added to every value with changing signs. Values are about 1.
const STEER: f32 = 0.004;

/// Lie that a host repeats in every answer.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr, strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HostLie {
    #[strum(serialize = "steering vector")]
    SteeringVector,
    #[strum(serialize = "4-bit weights as 8-bit")]
    CoarserWeights,
    #[strum(serialize = "skipped layer")]
    SkippedLayer,
    /// Rows of an earlier answer to the same caller.
    #[strum(serialize = "yesterday's rows, own")]
    OwnOldRows,
    /// Rows of an answer to another caller.
    #[strum(serialize = "yesterday's rows, others'")]
    OthersRows,
    #[strum(serialize = "truncated context")]
    TruncatedContext,
    #[strum(serialize = "coarser keys and values")]
    CoarserKeysAndValues,
}

impl HostLie {
    /// Name for people.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Description of the lie: a sentence without its subject, the host.
    pub(super) fn explanation(self) -> &'static str {
        match self {
            Self::SteeringVector => {
                "adds a small vector to every row, less than the bands of rows can notice"
            }
            Self::CoarserWeights => "computes with its matrices rounded to 4 bits",
            Self::SkippedLayer => "leaves one of its layers out",
            Self::OwnOldRows => "returns the rows of its first answer to this caller, by position",
            Self::OthersRows => {
                "returns rows of another text each time, as if kept from another caller"
            }
            Self::TruncatedContext => "lets a row see the last 16 positions only",
            Self::CoarserKeysAndValues => {
                "computes keys and values from matrices rounded to 4 bits, which stands for a \
                 coarser cache"
            }
        }
    }
}

/// Host that lies: the file that it computes with, and what it does to rows.
pub(super) struct Liar {
    pub(super) file: Arc<ModelFile>,
    pub(super) tamper: Tamper,
    pub(super) lied: Lied,
}

/// Whether a host lied since the last time.
#[derive(Clone, Default)]
pub(super) struct Lied {
    /// The host computes with another file.
    always: bool,
    changed: Arc<AtomicBool>,
}

impl Lied {
    pub(super) fn take(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel) || self.always
    }
}

impl Liar {
    pub(super) fn new(lie: HostLie, fleet: &Fleet) -> Result<Self> {
        let (file, width) = (fleet.shared_file(), fleet.width());
        match lie {
            HostLie::SteeringVector => {
                let steer = |passing: Passing<'_>| {
                    let values = passing.rows.iter_mut().enumerate();
                    values.for_each(|(n, value)| *value += [STEER, -STEER][n % 2]);
                };
                Ok(Self::tampering(file, Box::new(steer)))
            }
            HostLie::CoarserWeights => Self::computing(&file, |tensor, values| {
                if tensor.starts_with("blk.") && !tensor.ends_with("norm.weight") {
                    coarse(values);
                }
            }),
            HostLie::SkippedLayer => Self::computing(&file, |tensor, values| {
                // Without these matrices the layer adds nothing to a row.
                let of_layer = tensor.strip_prefix(&format!("blk.{SKIPPED}."));
                if matches!(of_layer, Some("attn_output.weight" | "ffn_down.weight")) {
                    values.fill(0.0);
                }
            }),
            HostLie::OwnOldRows => Ok(Self::tampering(file, own_old_rows(width))),
            HostLie::OthersRows => {
                let tamper = others_rows(&file, width)?;
                Ok(Self::tampering(file, tamper))
            }
            HostLie::TruncatedContext => {
                let tamper = truncated(&file, width)?;
                Ok(Self::tampering(file, tamper))
            }
            HostLie::CoarserKeysAndValues => Self::computing(&file, |tensor, values| {
                if tensor.ends_with("attn_k.weight") || tensor.ends_with("attn_v.weight") {
                    coarse(values);
                }
            }),
        }
    }

    /// Computes with the right file, and changes rows.
    fn tampering(file: Arc<ModelFile>, mut tamper: Tamper) -> Self {
        let lied = Lied::default();
        let changed = Arc::clone(&lied.changed);
        let watched = move |passing: Passing<'_>| {
            let Passing {
                spans,
                sent,
                rows,
                fault,
            } = passing;
            let before = rows.to_vec();
            tamper(Passing {
                spans,
                sent,
                rows: &mut *rows,
                fault,
            });
            if *rows != before[..] {
                changed.store(true, Ordering::Release);
            }
        };
        Self {
            file,
            tamper: Box::new(watched),
            lied,
        }
    }

    /// Computes with another file. `change` gets the name and the values of each tensor.
    fn computing(file: &ModelFile, change: impl Fn(&str, &mut Vec<f32>)) -> Result<Self> {
        let gguf = file.gguf();
        let bytes = rewritten(gguf, &[], |info, values| {
            let mut changed = values.clone();
            change(&info.name, &mut changed);
            match changed == values {
                true => (info.dtype, gguf.data(info).to_vec()),
                false => encoded(info.dtype, &changed),
            }
        });
        Ok(Self {
            file: Arc::new(ModelFile::from_gguf(Gguf::from_bytes(bytes)?)?),
            tamper: Box::new(|_| {}),
            lied: Lied {
                always: true,
                ..Lied::default()
            },
        })
    }
}

/// Rounds values to what a 4-bit type keeps of them.
fn coarse(values: &mut Vec<f32>) {
    let (_, bytes) = encoded(TensorType::Q4_0, values);
    let mut rounded = Vec::new();
    if quantize::decode(TensorType::Q4_0, &bytes, &mut rounded).is_ok() {
        *values = rounded;
    }
}

/// Calls `replace` with the sequence, position and content of each row of a batch.
fn each_row(passing: Passing<'_>, width: usize, mut replace: impl FnMut(SeqId, u32, &mut [f32])) {
    let mut rows = passing.rows.chunks_exact_mut(width);
    for span in passing.spans {
        for (position, row) in (span.position..span.position + span.rows).zip(rows.by_ref()) {
            replace(span.seq, position, row);
        }
    }
}

/// Returns at each position the row that it returned there first.
fn own_old_rows(width: usize) -> Tamper {
    let mut kept: HashMap<u32, Vec<f32>> = HashMap::new();
    Box::new(move |passing| {
        each_row(passing, width, |_, position, row| {
            let kept = kept.entry(position).or_insert_with(|| row.to_vec());
            row.copy_from_slice(kept);
        });
    })
}

/// Returns the rows of another text for each answer.
fn others_rows(file: &ModelFile, width: usize) -> Result<Tamper> {
    let mut model = FullModel::load(file, &one_thread(), &mut |_, _| {})?;
    let (vocab, mut texts) = (file.spec().vocab, 0);
    let mut kept: HashMap<SeqId, Vec<f32>> = HashMap::new();
    Ok(Box::new(move |passing| {
        each_row(passing, width, |seq, position, row| {
            let rows = kept.entry(seq).or_insert_with(|| {
                texts += 1;
                of_text(&mut model, vocab, texts).unwrap_or_default()
            });
            if let Some(old) = rows.chunks_exact(width).nth(position as usize) {
                row.copy_from_slice(old);
            }
        });
    }))
}

/// Rows behind the last layer of a text of a number, as long as a request with its answer.
fn of_text(model: &mut FullModel, vocab: u32, number: u32) -> Result<Vec<f32>> {
    let token = |at: u32| (number.wrapping_mul(2_654_435_761) >> 8).wrapping_add(at * 7) % vocab;
    let tokens: Vec<u32> = (0..PROMPT + TOKENS).map(token).collect();
    let mut rows = Vec::new();
    model.head().embed(&tokens, &mut rows)?;
    let engine = model.engine_mut();
    let seq = engine.open()?;
    let done = engine.forward(&[Span::new(seq, 0, PROMPT + TOKENS)], &mut rows);
    engine.close(seq);
    Ok(done.map(|()| rows)?)
}

/// Computes each row behind the last [`CONTEXT`] ones only.
fn truncated(file: &ModelFile, width: usize) -> Result<Tamper> {
    let layers = PRIVATE..file.spec().layers;
    let mut engine = Engine::load(file, layers, &one_thread(), &mut |_, _| {})?;
    let mut inputs: HashMap<SeqId, Vec<f32>> = HashMap::new();
    Ok(Box::new(move |passing: Passing<'_>| {
        let mut sent = passing.sent.chunks_exact(width);
        each_row(passing, width, |seq, position, row| {
            let input = inputs.entry(seq).or_default();
            input.truncate(position as usize * width);
            input.extend_from_slice(sent.next().unwrap_or_default());
            let from = (input.len() / width).saturating_sub(CONTEXT) * width;
            let mut last = input.get(from..).unwrap_or_default().to_vec();
            let Ok(seq) = engine.open() else { return };
            let span = Span::new(seq, 0, (last.len() / width) as u32);
            if engine.forward(&[span], &mut last).is_ok()
                && let Some(computed) = last.chunks_exact(width).next_back()
            {
                row.copy_from_slice(computed);
            }
            engine.close(seq);
        });
    }))
}
