//! The embedding table is public, and each of its rows is a token. A host that runs layer 0 could
//! look its input up and read prompt and answer, so the caller computes the first layers itself.
//! Here a host stores every row that it receives and looks all of them up.
//!
//! This does not prove that nothing can be read: `docs/privacy.md` lists other attacks of a host.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    // With one private layer or more, no row may be found. Without one, all are found, which proves
    // that the search works.
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

/// Runs an answer with this many private layers over a host that stores its input. Returns the
/// number of rows, and how many of them are in the embedding table.
fn overhear(runtime: Handle, private: u32) -> Result<(usize, usize)> {
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
