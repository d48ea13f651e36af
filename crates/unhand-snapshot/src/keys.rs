//! The texts PyTorch writes into every snapshot, with fixed ids, so that reading compares numbers and not bytes.

use crate::{Action, StringId, Strings};

macro_rules! known {
    ($($name:ident $text:literal)*) => {
        #[allow(clippy::upper_case_acronyms, non_camel_case_types)]
        enum Place { $($name),* }
        $(pub(crate) const $name: StringId = StringId(Place::$name as u32 + 1);)*
        const TEXTS: &[&str] = &[$($text),*];
    };
}

known! {
    ACTION "action"
    ADDR "addr"
    DEVICE_FREE "device_free"
    SIZE "size"
    STREAM "stream"
    TIME_US "time_us"
    COMPILE_CONTEXT "compile_context"
    USER_METADATA "user_metadata"
    POOL_ID "pool_id"
    FRAMES "frames"
    NAME "name"
    FILENAME "filename"
    LINE "line"
    ALLOC "alloc"
    FREE_REQUESTED "free_requested"
    FREE_COMPLETED "free_completed"
    FREE "free"
    SEGMENT_ALLOC "segment_alloc"
    SEGMENT_FREE "segment_free"
    SEGMENT_MAP "segment_map"
    SEGMENT_UNMAP "segment_unmap"
    SNAPSHOT "snapshot"
    OOM "oom"
    ANNOTATE "annotate"
    SEGMENTS "segments"
    DEVICE_TRACES "device_traces"
    ALLOCATOR_SETTINGS "allocator_settings"
    EXTERNAL_ANNOTATIONS "external_annotations"
    HOST_SEGMENTS "host_segments"
    HOST_TRACES "host_traces"
    DEVICE "device"
    ADDRESS "address"
    TOTAL_SIZE "total_size"
    ALLOCATED_SIZE "allocated_size"
    ACTIVE_SIZE "active_size"
    REQUESTED_SIZE "requested_size"
    SEGMENT_TYPE "segment_type"
    SEGMENT_POOL_ID "segment_pool_id"
    IS_EXPANDABLE "is_expandable"
    BLOCKS "blocks"
    STATE "state"
    HISTORY "history"
    REAL_SIZE "real_size"
    STAGE "stage"
    SMALL "small"
    LARGE "large"
    ACTIVE_ALLOCATED "active_allocated"
    ACTIVE_PENDING_FREE "active_pending_free"
    INACTIVE "inactive"
    START "START"
    END "END"
}

/// The known text with the greatest id.
pub(crate) const LAST: StringId = END;

/// The keys of a segment in PyTorch's order; an [`Extra`](crate::Extra) remembers absent ones by place.
pub(crate) const SEGMENT_KEYS: [StringId; 12] = [
    DEVICE,
    ADDRESS,
    TOTAL_SIZE,
    ALLOCATED_SIZE,
    ACTIVE_SIZE,
    REQUESTED_SIZE,
    STREAM,
    SEGMENT_TYPE,
    SEGMENT_POOL_ID,
    IS_EXPANDABLE,
    FRAMES,
    BLOCKS,
];

/// The keys of a block in PyTorch's order.
pub(crate) const BLOCK_KEYS: [StringId; 5] = [ADDRESS, SIZE, REQUESTED_SIZE, STATE, FRAMES];

/// The keys of an annotation in PyTorch's order.
pub(crate) const ANNOTATION_KEYS: [StringId; 4] = [STAGE, NAME, DEVICE, TIME_US];

/// A table that begins with the known texts.
pub(crate) fn strings() -> Strings {
    let mut strings = Strings::default();
    for text in TEXTS {
        strings.intern(text);
    }
    strings
}

/// The text of a known id.
pub(crate) fn text(id: StringId) -> &'static str {
    TEXTS[id.0 as usize - 1]
}

/// The action of a text.
#[inline]
pub(crate) fn action(id: StringId) -> Action {
    match id {
        ALLOC => Action::Alloc,
        FREE_REQUESTED => Action::FreeRequested,
        FREE_COMPLETED => Action::FreeCompleted,
        FREE => Action::Free,
        SEGMENT_ALLOC => Action::SegmentAlloc,
        SEGMENT_FREE => Action::SegmentFree,
        SEGMENT_MAP => Action::SegmentMap,
        SEGMENT_UNMAP => Action::SegmentUnmap,
        SNAPSHOT => Action::Snapshot,
        OOM => Action::Oom,
        ANNOTATE => Action::Annotate,
        _ => Action::Other,
    }
}

/// The text of an action; `None` for [`Action::Other`], whose text is the event's.
pub(crate) fn action_key(action: Action) -> Option<StringId> {
    Some(match action {
        Action::Alloc => ALLOC,
        Action::FreeRequested => FREE_REQUESTED,
        Action::FreeCompleted => FREE_COMPLETED,
        Action::Free => FREE,
        Action::SegmentAlloc => SEGMENT_ALLOC,
        Action::SegmentFree => SEGMENT_FREE,
        Action::SegmentMap => SEGMENT_MAP,
        Action::SegmentUnmap => SEGMENT_UNMAP,
        Action::Snapshot => SNAPSHOT,
        Action::Oom => OOM,
        Action::Annotate => ANNOTATE,
        Action::Other => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_the_places_in_a_fresh_table() {
        let strings = strings();
        assert_eq!(strings.get(ACTION), "action");
        assert_eq!(strings.get(LAST), "END");
        assert_eq!(strings.len(), LAST.0 as usize + 1);
        for &key in SEGMENT_KEYS.iter().chain(&BLOCK_KEYS).chain(&ANNOTATION_KEYS) {
            assert_eq!(strings.get(key), text(key));
        }
    }

    #[test]
    fn every_action_has_its_text() {
        for id in (ALLOC.0..=ANNOTATE.0).map(StringId) {
            assert_eq!(action_key(action(id)), Some(id));
        }
        assert_eq!(action_key(action(END)), None);
    }
}
