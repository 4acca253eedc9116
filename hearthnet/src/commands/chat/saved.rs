//! Conversation files: written by `/save`, read by `/load`.

use std::io::ErrorKind;
use std::path::Path;

use hearthnet_hub::reference::expand_home;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_tokens::ChatMessage;
use serde::{Deserialize, Serialize};

use crate::cli::{Failure, failure};

/// Most bytes of a file: many times the longest context of a model.
const MAX_BYTES: u64 = 16 << 20;
const MAX_MESSAGES: usize = 4096;

/// Format of the file: the fields of an OpenAI request, so that other programs can use it.
#[derive(Serialize, Deserialize)]
struct Saved {
    #[serde(default)]
    model: String,
    messages: Vec<ChatMessage>,
}

/// Writes a conversation, readable only by its owner. Replaces an existing file only if it holds a
/// conversation.
pub(super) fn save(path: &Path, model: &str, messages: &[ChatMessage]) -> Result<(), Failure> {
    let path = &expand_home(path);
    let fail = |why: &str| Failure::file("write", path, why).hint("name another file");
    if path.exists() && load(path).is_err() {
        return Err(fail("it does not hold a conversation"));
    }
    let saved = Saved {
        model: model.to_owned(),
        messages: messages.to_vec(),
    };
    let mut text = serde_json::to_vec_pretty(&saved).map_err(Failure::internal)?;
    text.push(b'\n');
    whole_file::replace(path, &text, Access::Owner).map_err(|e| fail(&e.to_string()))
}

pub(super) fn load(path: &Path) -> Result<Vec<ChatMessage>, Failure> {
    let path = &expand_home(path);
    let fail = |why: String| {
        failure!(BadRequest, "cannot read {}: {why}", path.display())
            .hint("/load takes what /save writes: {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}]}")
    };
    let text = regular_file::read(path, MAX_BYTES).map_err(|e| match e.kind() {
        ErrorKind::FileTooLarge => fail("it is too long for a conversation".into()),
        _ => fail(e.to_string()),
    })?;
    let saved: Saved = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
    if saved.messages.len() > MAX_MESSAGES {
        return Err(fail(format!("it has more than {MAX_MESSAGES} messages")));
    }
    Ok(saved.messages)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_saved_conversation_loads_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        let messages = [ChatMessage::system("s"), ChatMessage::user("ä\n\"b\"")];
        save(&path, "m", &messages).unwrap();
        assert_eq!(load(&path).unwrap(), messages);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        save(&path, "m", &messages[..1]).unwrap();
        assert_eq!(load(&path).unwrap(), messages[..1]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_without_a_conversation_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("letter.txt");
        std::fs::write(&path, "Dear Ana").unwrap();
        assert!(save(&path, "m", &[ChatMessage::user("x")]).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "Dear Ana");
    }

    #[test]
    fn a_file_without_a_conversation_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"messages": [{"role": "king", "content": ""}]}"#,
            "\u{0}",
        ] {
            std::fs::write(&path, wrong).unwrap();
            assert!(load(&path).is_err(), "{wrong:?}");
        }
        assert!(load(&dir.path().join("none")).is_err());
    }
}
