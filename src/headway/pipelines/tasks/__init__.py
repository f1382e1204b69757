"""The built-in tasks, one file a family; `headway.pipelines.registry` names them."""
