//! Two engines with consecutive layers as one: layers of one host on two devices.

use hearthnet_engine::{Footprint, Span};

use crate::engine::LayerEngine;
use crate::fault::StreamFault;

/// An engine, and one with the layers behind it. Rows of the model consist of the residual stream only
/// (`ModelSpec::per_layer` is `None`).
pub struct Joined<A, B> {
    first: A,
    second: B,
    /// First layer of the second engine.
    cut: u32,
}

impl<A: LayerEngine, B: LayerEngine> Joined<A, B> {
    pub fn new(first: A, second: B, cut: u32) -> Self {
        Self { first, second, cut }
    }

    /// Lengths of a sequence in the engines whose layers it runs through; 0 in the others.
    fn lengths(&self, (first, second): (A::Seq, B::Seq)) -> [u32; 2] {
        [self.first.len(first), self.second.len(second)]
    }

    /// Checks that a sequence has at least `position` positions.
    fn holds(&self, seq: (A::Seq, B::Seq), position: u32) -> Result<(), StreamFault> {
        match self.len(seq) {
            length if length < position => Err(StreamFault::PositionGap { position, length }),
            _ => Ok(()),
        }
    }
}

/// Forks a sequence of an engine, if it runs through layers of it.
fn fork<E: LayerEngine>(engine: &mut E, seq: E::Seq, length: u32) -> Result<E::Seq, StreamFault> {
    match engine.len(seq) {
        0 => engine.open(),
        _ => engine.fork(seq, length),
    }
}

impl<A: LayerEngine, B: LayerEngine> LayerEngine for Joined<A, B> {
    type Seq = (A::Seq, B::Seq);

    fn open(&mut self) -> Result<Self::Seq, StreamFault> {
        let first = self.first.open()?;
        let second = self.second.open();
        let second = second.inspect_err(|_| self.first.close(first))?;
        Ok((first, second))
    }

    fn fork(&mut self, seq: Self::Seq, length: u32) -> Result<Self::Seq, StreamFault> {
        self.holds(seq, length)?;
        let first = fork(&mut self.first, seq.0, length)?;
        let second = fork(&mut self.second, seq.1, length);
        let second = second.inspect_err(|_| self.first.close(first))?;
        Ok((first, second))
    }

    fn close(&mut self, seq: Self::Seq) {
        self.first.close(seq.0);
        self.second.close(seq.1);
    }

    fn len(&self, seq: Self::Seq) -> u32 {
        let used = self.lengths(seq).into_iter().filter(|length| *length > 0);
        used.min().unwrap_or(0)
    }

    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<u32, StreamFault> {
        self.holds(seq, length)?;
        let mut kept = length;
        loop {
            let asked = kept;
            let [first, second] = self.lengths(seq);
            if first > 0 {
                kept = self.first.truncate(seq.0, kept)?;
            }
            if second > 0 {
                kept = self.second.truncate(seq.1, kept)?;
            }
            // An engine with recurrent layers may keep less than was asked. Then the other one, too.
            if kept == asked {
                return Ok(kept);
            }
        }
    }

    fn forward(
        &mut self,
        (lo, hi): (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        if lo < self.cut {
            let layers = (lo, hi.min(self.cut - 1));
            let spans: Vec<_> = spans.iter().map(|span| span.of(span.seq.0)).collect();
            self.first.forward(layers, &spans, x)?;
        }
        if hi >= self.cut {
            let layers = (lo.max(self.cut), hi);
            let spans: Vec<_> = spans.iter().map(|span| span.of(span.seq.1)).collect();
            self.second.forward(layers, &spans, x)?;
        }
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        self.first.weight_bytes() + self.second.weight_bytes()
    }

    fn footprint(&self) -> Footprint {
        let (first, second) = (self.first.footprint(), self.second.footprint());
        Footprint {
            per_sequence: first.per_sequence.saturating_add(second.per_sequence),
            per_position: first.per_position.saturating_add(second.per_position),
            page: first.page.max(second.page),
        }
    }

    fn kv_bytes_in_use(&self) -> u64 {
        self.first.kv_bytes_in_use() + self.second.kv_bytes_in_use()
    }

    fn card(&self) -> Option<String> {
        match (self.first.card(), self.second.card()) {
            (None, None) => None,
            (Some(card), None) | (None, Some(card)) => Some(format!("{card} and the processor")),
            (Some(first), Some(second)) => Some(format!("{first} and {second}")),
        }
    }

    fn is_lost(&mut self) -> bool {
        self.first.is_lost() || self.second.is_lost()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use hearthnet_engine::{Engine, EngineOptions};
    use hearthnet_files::ModelFile;
    use hearthnet_testkit::{embeddings, families, family};

    use super::*;

    const POSITIONS: u32 = 70;

    fn engine(file: &ModelFile, layers: Range<u32>) -> Engine {
        let options = EngineOptions {
            threads: 1,
            ..EngineOptions::default()
        };
        Engine::load(file, layers, &options, &mut |_, _| ()).expect("an engine")
    }

    /// Appends the rows up to a position, and returns their outputs.
    fn append<E: LayerEngine>(
        engine: &mut E,
        seq: E::Seq,
        x: &[f32],
        file: &ModelFile,
        to: u32,
    ) -> Vec<f32> {
        let (width, from) = (file.spec().width as usize, engine.len(seq));
        let mut rows = x[width * from as usize..width * to as usize].to_vec();
        let spans = [Span::new(seq, from, to - from)];
        engine
            .forward((0, file.spec().layers - 1), &spans, &mut rows)
            .expect("rows");
        rows
    }

    /// Appends, goes back, forks and appends again, with lengths of both engines made equal.
    fn assert_same_bytes(file: &ModelFile, cut: u32, name: &str) {
        let layers = file.spec().layers;
        let mut whole = engine(file, 0..layers);
        let parts = (engine(file, 0..cut), engine(file, cut..layers));
        let mut joined = Joined::new(parts.0, parts.1, cut);
        let x = embeddings(file, POSITIONS as usize, cut);
        let (one, two) = (whole.open().expect("room"), joined.open().expect("room"));
        let mut both = vec![(one, two)];
        for (to, back) in [(40, 33), (34, 34), (POSITIONS, 64), (65, 1), (9, 0), (3, 3)] {
            let (one, two) = *both.last().expect("a pair");
            let outputs = append(&mut whole, one, &x, file, to);
            assert_eq!(
                outputs,
                append(&mut joined, two, &x, file, to),
                "{name} {cut}: {to}"
            );
            assert_eq!(joined.len(two), to);
            let mut kept = back;
            loop {
                let one = LayerEngine::truncate(&mut whole, one, kept).expect("shorter");
                let least = joined.truncate(two, one).expect("shorter");
                if least == kept {
                    break;
                }
                kept = least;
            }
            assert_eq!(
                (LayerEngine::len(&whole, one), joined.len(two)),
                (kept, kept)
            );
            if kept > 0 {
                let one = LayerEngine::fork(&mut whole, one, kept).expect("room");
                both.push((one, joined.fork(two, kept).expect("room")));
            }
        }
        let gap = joined.truncate(two, POSITIONS + 1);
        assert!(
            matches!(gap, Err(StreamFault::PositionGap { .. })),
            "{gap:?}"
        );
        for (_, two) in both {
            joined.close(two);
        }
        assert_eq!(joined.kv_bytes_in_use(), 0);
    }

    #[test]
    fn two_engines_give_the_bytes_of_one_for_every_family_and_cut() {
        let mut cuts = 0;
        for name in families() {
            let file = family(&name);
            let spec = file.spec();
            if spec.encoder.is_some() || spec.per_layer.is_some() {
                continue;
            }
            for cut in 1..spec.layers {
                if spec.check_cut(cut).is_ok() {
                    assert_same_bytes(&file, cut, &name);
                    cuts += 1;
                }
            }
        }
        assert!(cuts > 30, "{cuts} cuts");
    }

    #[test]
    fn a_sequence_may_run_through_the_layers_of_one_engine_alone() {
        let file = family("llama31");
        let (layers, width) = (file.spec().layers, file.spec().width as usize);
        let mut joined = Joined::new(engine(&file, 0..1), engine(&file, 1..layers), 1);
        let mut alone = engine(&file, 1..layers);
        let mut x = embeddings(&file, 5, 7);
        let (seq, own) = (joined.open().expect("room"), alone.open().expect("room"));
        let mut expected = x.clone();
        let (range, rows) = ((1, layers - 1), x.len() / width);
        let span = |seq| [Span::new(seq, 0, rows as u32)];
        LayerEngine::forward(&mut alone, range, &span(own), &mut expected).expect("rows");
        let span = [Span::new(seq, 0, rows as u32)];
        joined.forward(range, &span, &mut x).expect("rows");
        assert_eq!(x, expected);
        assert_eq!(joined.len(seq), 5);
        let fork = joined.fork(seq, 4).expect("room");
        assert_eq!((joined.len(fork), joined.truncate(seq, 2)), (4, Ok(2)));
    }
}
