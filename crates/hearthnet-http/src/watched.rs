//! Values that are read from files, and read again when one of the files changes.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use hearthnet_platform::files::{changed_ns, inode};
use parking_lot::Mutex;

/// Device-independent mark of a file's content: length, inode number, time of the last change.
type Mark = Option<(u64, u64, i128)>;

type Read<T, E> = Box<dyn Fn() -> Result<T, E> + Send + Sync>;

/// A value from files. Each use looks whether they have changed, which costs a system call per file.
pub(crate) struct Watched<T, E> {
    paths: Vec<PathBuf>,
    read: Read<T, E>,
    state: Mutex<(Vec<Mark>, Arc<T>)>,
}

impl<T, E> Watched<T, E> {
    /// Reads the value of these files for the first time.
    pub(crate) fn new(paths: Vec<PathBuf>, read: Read<T, E>) -> Result<Self, E> {
        // Marked before they are read: a change meanwhile is then noticed later.
        let marks = marks(&paths);
        let value = Arc::new(read()?);
        Ok(Self {
            paths,
            read,
            state: Mutex::new((marks, value)),
        })
    }

    /// The value now. If the files have changed and cannot be used, `failed` is called once for this
    /// change, and the earlier value remains.
    pub(crate) fn get(&self, failed: impl FnOnce(E)) -> Arc<T> {
        let mut state = self.state.lock();
        let now = marks(&self.paths);
        if state.0 != now {
            state.0 = now;
            match (self.read)() {
                Ok(value) => state.1 = Arc::new(value),
                Err(error) => failed(error),
            }
        }
        Arc::clone(&state.1)
    }
}

fn marks(paths: &[PathBuf]) -> Vec<Mark> {
    let mark = |path: &PathBuf| {
        let file = fs::metadata(path).ok()?;
        Some((file.len(), inode(&file), changed_ns(&file)))
    };
    paths.iter().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_again_and_an_unusable_one_leaves_the_earlier_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let at = path.clone();
        let read = move || {
            let text = fs::read_to_string(&at).map_err(|error| error.to_string())?;
            text.parse::<u32>().map_err(|error| error.to_string())
        };
        fs::write(&path, "x").unwrap();
        assert!(Watched::new(vec![path.clone()], Box::new(read.clone())).is_err());
        fs::write(&path, "1").unwrap();
        let watched = Watched::new(vec![path.clone()], Box::new(read)).unwrap();
        let get = || {
            let mut errors = 0;
            let value = *watched.get(|_| errors += 1);
            (value, errors)
        };
        assert_eq!(get(), (1, 0));
        fs::write(&path, "22").unwrap();
        assert_eq!(get(), (22, 0));
        fs::write(&path, "nonsense").unwrap();
        assert_eq!([get(), get()], [(22, 1), (22, 0)]);
        fs::remove_file(&path).unwrap();
        assert_eq!([get(), get()], [(22, 1), (22, 0)]);
        fs::write(&path, "3").unwrap();
        assert_eq!(get(), (3, 0));
    }
}
