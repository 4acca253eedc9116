//! The embedding table is public, and a row of it is a word: a host that runs layer 0 looks up
//! what it is sent, and reads prompt and answer. So a caller runs the first layers itself. Here a
//! host keeps every row that it is sent, and looks all of them up.
//!
//! That no row is found is not that nothing can be read: `docs/privacy.md` says what else a host can do.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::fleet::Fleet;
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    // One first layer is enough that none is found; none at all, and all of them are: what
    // this attack finds nothing with does find something.
    for private in [2, 1, 0] {
        let runtime = Handle::current();
        let overheard = tokio::task::spawn_blocking(move || overhear(runtime, private));
        let (rows, known) = overheard.await??;
        let what = format!("{private} private first layers, {rows} rows: rows in the table");
        let expected = if private == 0 { rows } else { 0 };
        found.check(
            what,
            expected.to_string(),
            known,
            rows > 0 && known == expected,
        );
    }
    Ok(())
}

/// Has a caller with so many private layers answer over a host that keeps what it is sent: how
/// many rows that were, and how many of them are in the embedding table.
fn overhear(runtime: Handle, private: u32) -> Result<(usize, usize), HarnessError> {
    let fleet = Fleet::new(runtime, None)?;
    let width = fleet.width();
    let bits = move |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let heard: Arc<Mutex<Vec<Vec<u32>>>> = Arc::default();
    let ear = Arc::clone(&heard);
    fleet.ask(
        private,
        vec![Box::new(move |passing| {
            let mut heard = ear.lock();
            heard.extend(passing.sent.chunks_exact(width).map(bits));
        })],
    )?;
    let table: BTreeSet<Vec<u32>> = fleet.table()?.chunks_exact(width).map(bits).collect();
    let heard = heard.lock();
    let known = heard.iter().filter(|row| table.contains(*row)).count();
    Ok((heard.len(), known))
}
