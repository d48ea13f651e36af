//! What can be made of a pickle whose data ends early. Nothing is guessed: half an event is left out.

use crate::Error;
use crate::item::Item;
use crate::machine::Machine;

impl Machine<'_> {
    /// Ends what was being built when the data ran out.
    ///
    /// Lists keep what they have, while a dict that was being filled is left out, since half an event or block would
    /// be wrong and not merely incomplete. The dict at the bottom is the snapshot itself and stays.
    pub(crate) fn finish_truncated(&mut self) -> Result<Item, Error> {
        self.op_at = self.length();
        // A dict without a mark and without any item has only just begun.
        if self.stack.len() > 1
            && self.marks.last() != Some(&self.stack.len())
            && self.stack.last().is_some_and(|&top| self.is_open_dict(top) && self.is_empty_dict(top))
        {
            self.stack.pop();
        }
        while let Some(from) = self.marks.pop() {
            let from = from.min(self.stack.len());
            let Some(target) = from.checked_sub(1) else {
                self.stack.clear();
                break;
            };
            if self.is_open_list(self.stack[target]) {
                self.fold_last_list(from)?;
                self.append_items(from)?;
            } else if target == 0 {
                self.fold_values(from)?;
                // A key whose value did not come.
                let n_whole = (self.stack.len() - from) / 2 * 2;
                self.stack.truncate(from + n_whole);
                self.set_items(from)?;
            } else {
                self.stack.truncate(target);
            }
        }
        self.fold(1)?;
        match self.stack.first() {
            Some(&root) => Ok(self.take(root)),
            None => Err(self.truncated()),
        }
    }

    /// Among keys and values in turn, a list in the place of a key belongs into the list before it: lists of one
    /// item are pickled without a mark, the item first and `APPEND` after it.
    fn fold_values(&mut self, from: usize) -> Result<(), Error> {
        let mut key = from;
        while key < self.stack.len() {
            if !self.is_hashable(self.stack[key]) {
                return self.fold(key);
            }
            key += 2;
        }
        Ok(())
    }

    /// The same among the items of a list: what follows a list that was just begun is its first item.
    fn fold_last_list(&mut self, from: usize) -> Result<(), Error> {
        if let [.., before, last] = self.stack[from..]
            && self.is_open_list(before)
            && !self.is_open_list(last)
        {
            self.append_items(self.stack.len() - 1)?;
        }
        Ok(())
    }

    /// Appends items to the lists below them until the stack has this height.
    fn fold(&mut self, height: usize) -> Result<(), Error> {
        while self.stack.len() > height.max(1) {
            let n = self.stack.len();
            if self.is_open_list(self.stack[n - 2]) {
                self.append_items(n - 1)?;
            } else if n == 3 && self.is_open_dict(self.stack[0]) && self.is_hashable(self.stack[1]) {
                self.set_items(1)?;
            } else {
                self.stack.pop();
            }
        }
        Ok(())
    }
}
