//! A member of the community as a source of pieces.

use std::ops::Range;
use std::time::Duration;

use hearthnet_bus::node::weights::{self, MAX_DATA_BYTES, WeightsError, WeightsPeer};
use hearthnet_files::part::Piece;
use hearthnet_hub::parts::{Object, PieceSource, Rank, SourceError};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::node::link_rates::RateMeter;

/// Longest time for a range of an object, also of a neighbour that sends it little by little.
const LONGEST: Duration = Duration::from_secs(60);

pub(super) struct Neighbour {
    pub(super) name: String,
    pub(super) peer: WeightsPeer,
    pub(super) weights: [u8; 32],
    pub(super) meter: RateMeter,
    /// Runs the requests of the threads of a fetch.
    pub(super) runtime: Handle,
}

fn failed(error: WeightsError) -> SourceError {
    match error {
        WeightsError::ProtocolViolation(_) => SourceError::Unusable(error.to_string()),
        _ => SourceError::Unavailable(error.to_string()),
    }
}

impl PieceSource for Neighbour {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> Rank {
        Rank::Neighbour
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        let held = self.runtime.block_on(self.peer.held(&self.weights));
        Ok(held.map_err(failed)?.unwrap_or_default().pieces)
    }

    /// Half of the requests that may be in flight: 2 MiB, which a link of 1 Gbit/s carries in 17 ms. From
    /// an answer to the next request, four threads of low priority take turns.
    fn lanes(&self) -> usize {
        8
    }

    fn run(&self) -> u32 {
        1
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        let [piece] = run else {
            return Ok(None);
        };
        let asked = self.peer.piece(&self.weights, piece.index);
        let bytes = self.runtime.block_on(asked).map_err(failed)?;
        self.meter.received(bytes.as_ref().map_or(0, Vec::len));
        Ok(bytes)
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        let object = match object {
            Object::Head => weights::Object::Head,
            Object::Manifest => weights::Object::Manifest,
            Object::PieceList => weights::Object::PieceList,
        };
        let len = len.min(MAX_DATA_BYTES as u32);
        let asked = self.peer.read(&self.weights, object, offset, len);
        // A timer needs the runtime from its beginning.
        let answer = self
            .runtime
            .block_on(async { timeout(LONGEST, asked).await });
        let answer = answer.map_err(|_| SourceError::Silent(LONGEST))?;
        answer.map_err(failed)
    }
}
