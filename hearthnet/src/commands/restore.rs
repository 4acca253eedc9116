//! `hearthnet restore`: makes this machine the node of a backup. Never overwrites existing data.
//! The restored node writes no event until another member has sent the events that it wrote after
//! the backup.

use std::path::{Path, PathBuf};

use hearthnet_bus::NodeKey;
use hearthnet_bus::log::backup::{self, Parts};
use hearthnet_bus::log::{EventLog, LogError};
use hearthnet_platform::whole_file::{self, Access};
use serde_json::json;

use super::backup::CONFIG;
use crate::cli::args::{Global, RestoreArgs};
use crate::cli::{Failure, Kind, failure, note, print, print_json};
use crate::config::default_path;
use crate::home::{LOG_FILE, NODE_KEY, ROOT_KEY, membership};

pub(crate) fn run(args: &RestoreArgs, global: &Global) -> Result<(), Failure> {
    let dir = global.dir()?;
    refuse_living(&dir)?;
    let unusable = |e: LogError| {
        let (what, hint) = match &e {
            LogError::Corrupt { what } => (
                format!("the backup is damaged: {what}"),
                "nothing was restored; name another backup",
            ),
            e => (e.to_string(), "name a file that `hearthnet backup` wrote"),
        };
        failure!(Host, "{}: {what}", args.file.display())
            .code("bad_backup")
            .hint(hint)
    };
    let (parts, has_log) = backup::read(&args.file).map_err(unusable)?;
    // Build the directory beside its final place, and move it there when it is complete.
    let draft = Draft::beside(&dir)?;
    for name in [NODE_KEY, ROOT_KEY, membership::FILE] {
        if let Some(bytes) = parts.get(name) {
            write(&draft.0.join(name), bytes)?;
        }
    }
    let bad = |what: String| {
        Failure::new(Kind::Host, what)
            .code("bad_backup")
            .hint("name another backup")
    };
    let key = NodeKey::load(&draft.0.join(NODE_KEY))
        .map_err(|e| bad(format!("the key in the backup is invalid: {e}")))?;
    let mut community = None;
    if has_log {
        backup::restore_log(&args.file, &draft.0).map_err(unusable)?;
        let log = EventLog::open(&draft.0).map_err(unusable)?;
        let found = log.verify().map_err(unusable)?;
        if let Some(problem) = found.problems.first() {
            return Err(bad(format!("the log in the backup is damaged: {problem}")));
        }
        community = Some(log.state().name.clone());
    }
    draft.become_dir(&dir)?;
    if has_log {
        // Opening the log in its final place creates its lock and name files there.
        EventLog::open(&dir)?;
    }
    let config = restore_config(&parts, global)?;
    report(args, &key, community, config, &dir)
}

/// Refuses a directory that holds a node or anything else.
fn refuse_living(dir: &Path) -> Result<(), Failure> {
    let what = [NODE_KEY, LOG_FILE, ROOT_KEY]
        .into_iter()
        .find(|name| dir.join(name).exists());
    let empty = std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
    let why = match (what, empty) {
        (Some(name), _) => format!("there is a node in {} already ({name})", dir.display()),
        (None, false) => format!("{} is not empty", dir.display()),
        (None, true) => return Ok(()),
    };
    Err(Failure::new(Kind::Host, why)
        .code("not_empty")
        .hint("move the directory away, or name another one with --data-dir"))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    whole_file::create(path, bytes, Access::Owner).map_err(|e| Failure::file("write", path, e))
}

/// Writes the configuration, if there is none. Returns its path, and whether it was written.
fn restore_config(parts: &Parts, global: &Global) -> Result<Option<(PathBuf, bool)>, Failure> {
    let (Some(bytes), Some(path)) = (
        parts.get(CONFIG),
        global.config.clone().or_else(default_path),
    ) else {
        return Ok(None);
    };
    if path.exists() {
        return Ok(Some((path, false)));
    }
    let fail = |e: std::io::Error| Failure::file("write", &path, e);
    whole_file::make_folder(whole_file::folder_of(&path), Access::Readable).map_err(fail)?;
    whole_file::create(&path, bytes, Access::Readable).map_err(fail)?;
    Ok(Some((path, true)))
}

fn report(
    args: &RestoreArgs,
    key: &NodeKey,
    community: Option<String>,
    config: Option<(PathBuf, bool)>,
    dir: &Path,
) -> Result<(), Failure> {
    if args.json {
        return print_json(&json!({
            "node": key.id().to_string(),
            "community": community,
            "data_dir": dir.to_string_lossy(),
            "config": config.as_ref().map(|(path, written)| json!({ "path": path.to_string_lossy(), "written": written })),
        }));
    }
    let config = match &config {
        None => "not in the backup".to_owned(),
        Some((path, true)) => format!("{} (written)", path.display()),
        Some((path, false)) => format!("{} (left as it was)", path.display()),
    };
    print(format!(
        "node           {}\ncommunity      {}\ndata           {}\nconfiguration  {config}\n",
        key.id().short(),
        community.as_deref().unwrap_or("none"),
        dir.display(),
    ))?;
    if community.is_some() {
        note(
            "this node writes no new events until another member has sent the events that it wrote after the backup. Only one machine may use this key: if the old one still \
             runs, stop it.",
        );
    }
    Ok(())
}

/// Incomplete data directory, removed when dropped.
struct Draft(PathBuf);

impl Draft {
    fn beside(dir: &Path) -> Result<Self, Failure> {
        let fail = |e: std::io::Error| {
            Failure::file("make a folder beside", dir, e)
                .hint("choose another directory with --data-dir")
        };
        let mut name = std::ffi::OsString::from(".");
        name.push(dir.file_name().unwrap_or("hearthnet".as_ref()));
        name.push(format!(".restoring-{}", std::process::id()));
        let draft = Self(dir.with_file_name(name));
        whole_file::make_folder(&draft.0, Access::Owner).map_err(fail)?;
        Ok(draft)
    }

    fn become_dir(self, dir: &Path) -> Result<(), Failure> {
        let fail = |e: std::io::Error| {
            Failure::file("make", dir, e).hint("choose another directory with --data-dir")
        };
        // The draft's lock file belongs to no process.
        let _ = std::fs::remove_file(self.0.join("log.lock"));
        // Succeeds only if the target is missing or an empty folder.
        std::fs::rename(&self.0, dir).map_err(fail)?;
        whole_file::sync_folder(whole_file::folder_of(dir)).map_err(fail)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
